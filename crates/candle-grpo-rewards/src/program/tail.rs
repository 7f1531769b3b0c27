//! The end of a program's output.

use std::collections::VecDeque;
use std::io::Read;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

/// A text's last few kilobytes.
#[derive(Default)]
pub(super) struct Tail(VecDeque<u8>);

impl Tail {
    const KEPT: usize = 4096;

    /// Reads a pipe on a thread until it closes.
    pub(super) fn read(
        mut pipe: impl Read + Send + 'static,
    ) -> (Arc<Mutex<Self>>, thread::JoinHandle<()>) {
        let tail = Arc::new(Mutex::new(Self::default()));
        let read = Arc::clone(&tail);
        let reader = thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = pipe.read(&mut bytes) {
                read.lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push(&bytes[..count]);
            }
        });
        (tail, reader)
    }

    fn push(&mut self, bytes: &[u8]) {
        self.0.extend(bytes);
        let excess = self.0.len().saturating_sub(Self::KEPT);
        self.0.drain(..excess);
    }

    pub(super) fn text(&mut self) -> String {
        String::from_utf8_lossy(self.0.make_contiguous()).into_owned()
    }
}
