//! Threads that start programs.

use std::io;
use std::thread;

/// Runs a function on its own thread.
pub(super) fn on_thread<T: Send>(run: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    thread::scope(|scope| {
        let ended = thread::Builder::new().spawn_scoped(scope, run)?.join();
        ended.map_err(|_| io::Error::other("the thread that starts a program panicked"))?
    })
}
