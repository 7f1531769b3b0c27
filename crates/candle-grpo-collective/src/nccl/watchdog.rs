//! Threads that end the process if another rank has ended.
//!
//! NCCL waits forever for a rank that has ended, and its operations run on the GPU, where no call
//! in this process could return an error.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::process;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use candle_core::cuda_backend::cudarc::driver::CudaEvent;
use candle_core::{Error, Result};

use super::library::Comm;

/// Time between two checks of the communicator.
const INTERVAL: Duration = Duration::from_millis(200);

/// Maximum time for NCCL to end its own operations.
const ABORT: Duration = Duration::from_secs(5);

/// A rank that ends without an error sends this byte on each of its connections.
const END: &[u8] = b".";

/// Ends the process if a connection closes, if the communicator has an error, or if an operation
/// takes too long.
pub(super) struct Watchdog {
    shared: Arc<Shared>,
    connections: Vec<TcpStream>,
    /// An event at the end of each operation.
    operations: Sender<Arc<CudaEvent>>,
    /// Dropped at the end, which stops the checking thread.
    _checking: Sender<()>,
}

struct Shared {
    rank: usize,
    /// Taken at the end, and by the thread that aborts.
    comm: Mutex<Option<Arc<Comm>>>,
    /// Time for which an operation has been running.
    running: Mutex<Option<Duration>>,
    is_ending: AtomicBool,
}

impl Watchdog {
    /// Starts to watch the ranks at the other ends of `connections`: all for rank 0, and rank 0 for
    /// the others.
    pub(super) fn start(
        rank: usize,
        comm: &Arc<Comm>,
        connections: Vec<TcpStream>,
        bound: Duration,
    ) -> Result<Self> {
        let shared = Arc::new(Shared {
            rank,
            comm: Mutex::new(Some(Arc::clone(comm))),
            running: Mutex::new(None),
            is_ending: AtomicBool::new(false),
        });
        for (index, connection) in connections.iter().enumerate() {
            let other = if rank == 0 { index + 1 } else { 0 };
            let (shared, connection) = (Arc::clone(&shared), connection.try_clone()?);
            spawn("nccl-connection", move || shared.watch(connection, other))?;
        }
        let (operations, events) = mpsc::channel();
        let waiting = Arc::clone(&shared);
        spawn("nccl-operations", move || waiting.wait(&events))?;
        let (checking, ended) = mpsc::channel();
        let checked = Arc::clone(&shared);
        spawn("nccl-watchdog", move || checked.check(&ended, bound))?;
        Ok(Self {
            shared,
            connections,
            operations,
            _checking: checking,
        })
    }

    /// Watches an operation that ends with `event`.
    pub(super) fn operation(&self, event: Arc<CudaEvent>) {
        // The thread ends only with this sender.
        let _ = self.operations.send(event);
    }

    /// Ends the process after an error in this rank. The other ranks notice it.
    pub(super) fn abort(&self, code: i32) -> ! {
        self.shared.end("this rank aborts", code)
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.shared.is_ending.store(true, Ordering::SeqCst);
        *lock(&self.shared.comm) = None;
        for connection in &mut self.connections {
            if !thread::panicking() {
                // The other rank may have ended already.
                let _ = connection.write_all(END);
            }
            let _ = connection.shutdown(Shutdown::Both);
        }
    }
}

impl Shared {
    /// Waits until the rank at the other end of a connection ends.
    fn watch(&self, mut connection: TcpStream, other: usize) {
        let mut byte = [0];
        let ended = connection.read(&mut byte).unwrap_or(0);
        if byte[..ended] != *END && !self.is_ending.load(Ordering::SeqCst) {
            self.end(&format!("rank {other} has ended before this one"), 1);
        }
    }

    /// Waits for one operation after another. Driver calls may take forever.
    fn wait(&self, operations: &Receiver<Arc<CudaEvent>>) {
        for operation in operations {
            *lock(&self.running) = Some(Duration::ZERO);
            if let Err(error) = operation.synchronize()
                && !self.is_ending.load(Ordering::SeqCst)
            {
                self.end(&format!("an operation failed: {error}"), 1);
            }
            *lock(&self.running) = None;
        }
    }

    /// Checks the communicator until the end.
    fn check(&self, ended: &Receiver<()>, bound: Duration) {
        while ended.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
            let comm = lock(&self.comm).clone();
            let Some(comm) = comm else {
                return;
            };
            if let Err(error) = comm.async_error() {
                self.end(&error.to_string(), 1);
            }
            // On a clock, time while the processes were stopped would count.
            let running = lock(&self.running).as_mut().map(|time| {
                *time += INTERVAL;
                *time
            });
            if let Some(running) = running.filter(|&time| time > bound) {
                self.end(
                    &format!("an operation has waited for other ranks for {running:?}"),
                    1,
                );
            }
        }
    }

    /// Writes the reason and ends the process with the exit code.
    fn end(&self, reason: &str, code: i32) -> ! {
        eprintln!("rank {}: NCCL: {reason}; the process ends", self.rank);
        let (done, aborted) = mpsc::channel();
        if let Some(comm) = lock(&self.comm).take() {
            thread::spawn(move || {
                comm.abort();
                let _ = done.send(());
            });
            let _ = aborted.recv_timeout(ABORT);
        }
        // Handlers in `exit` may wait for the GPU.
        thread::spawn(|| {
            thread::sleep(ABORT);
            process::abort();
        });
        process::exit(code)
    }
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<()> {
    let thread = thread::Builder::new().name(name.to_owned()).spawn(work);
    thread.map(|_| ()).map_err(Error::wrap)
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
