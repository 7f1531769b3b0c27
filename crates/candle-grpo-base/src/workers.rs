//! Threads that work through a list of jobs.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};

/// Interval at which a waiting thread checks for cancellation.
pub const POLL: Duration = Duration::from_millis(20);

/// Threads that take jobs in order. Dropping the value asks them to stop, but does not wait, since
/// a thread may be in a request.
pub struct Workers<T> {
    name: &'static str,
    stop: Arc<AtomicBool>,
    /// Number of threads that have not ended, or have panicked.
    running: Arc<AtomicUsize>,
    results: Receiver<Result<T>>,
}

impl<T: Send + 'static> Workers<T> {
    /// Starts at most `threads` threads that call `work` with each job. It returns `None` if the
    /// flag asks it to stop. The first error stops all threads.
    ///
    /// # Errors
    ///
    /// If a thread cannot be started.
    pub fn start<J: Send + 'static>(
        name: &'static str,
        threads: usize,
        jobs: impl IntoIterator<Item = J>,
        work: impl Fn(J, &AtomicBool) -> Result<Option<T>> + Send + Sync + 'static,
    ) -> Result<Self> {
        let jobs: VecDeque<J> = jobs.into_iter().collect();
        let threads = threads.min(jobs.len());
        let (sender, results) = channel();
        let stop = Arc::new(AtomicBool::new(false));
        let running = Arc::new(AtomicUsize::new(threads));
        let workers = Self {
            name,
            stop: Arc::clone(&stop),
            running: Arc::clone(&running),
            results,
        };
        let jobs = Arc::new(Mutex::new(jobs));
        let work = Arc::new(work);
        for _ in 0..threads {
            let (jobs, work) = (Arc::clone(&jobs), Arc::clone(&work));
            let (stop, sender) = (Arc::clone(&stop), sender.clone());
            let running = Arc::clone(&running);
            let run_all = move || {
                while !stop.load(Ordering::Acquire) {
                    // No code panics while it holds the lock.
                    let mut left = jobs.lock().unwrap_or_else(PoisonError::into_inner);
                    let job = left.pop_front();
                    drop(left);
                    let Some(job) = job else {
                        return;
                    };
                    let Some(result) = work(job, &stop).transpose() else {
                        return;
                    };
                    if result.is_err() {
                        stop.store(true, Ordering::Release);
                    }
                    // The receiver ends with the call.
                    if sender.send(result).is_err() {
                        return;
                    }
                }
            };
            let run = move || {
                run_all();
                running.fetch_sub(1, Ordering::AcqRel);
            };
            let thread = thread::Builder::new().name(name.to_owned());
            thread.spawn(run).context("starting a thread")?;
        }
        Ok(workers)
    }

    /// The next finished result. `None` if there is none yet.
    ///
    /// # Errors
    ///
    /// If a job failed, or no thread is left.
    pub fn next(&self) -> Result<Option<T>> {
        match self.results.recv_timeout(POLL) {
            Ok(result) => result.map(Some),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => self.panicked(),
        }
    }

    /// Asks the threads to stop after the jobs that they have begun.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Release);
    }

    /// Asks the threads to stop, and returns the results until they have. Calls `waiting` at
    /// intervals.
    ///
    /// # Errors
    ///
    /// If a job or `waiting` fails, or a thread panicked.
    pub fn drain(self, mut waiting: impl FnMut() -> Result<()>) -> Result<Vec<T>> {
        self.stop();
        let mut results = Vec::new();
        loop {
            match self.results.recv_timeout(POLL) {
                Ok(result) => results.push(result?),
                Err(RecvTimeoutError::Timeout) => waiting()?,
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        match self.running.load(Ordering::Acquire) {
            0 => Ok(results),
            _ => self.panicked(),
        }
    }

    fn panicked<R>(&self) -> Result<R> {
        bail!("a thread of the {} panicked", self.name)
    }
}

impl<T> Drop for Workers<T> {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all<T: Send + 'static>(workers: &Workers<T>, count: usize) -> Result<Vec<T>> {
        let mut results = Vec::new();
        while results.len() < count {
            results.extend(workers.next()?);
        }
        Ok(results)
    }

    #[test]
    fn each_job_has_one_result() {
        let workers = Workers::start("test", 4, 0..100, |job, _| Ok(Some(job))).unwrap();
        let mut results = all(&workers, 100).unwrap();
        results.sort_unstable();
        assert!(results.into_iter().eq(0..100));
    }

    #[test]
    fn an_error_and_a_panic_end_the_wait() {
        let fail = |job: usize, _: &AtomicBool| match job {
            3 => bail!("three"),
            job => Ok(Some(job)),
        };
        let workers = Workers::start("test", 1, 0..9, fail).unwrap();
        assert_eq!(all(&workers, 9).unwrap_err().to_string(), "three");

        let workers = Workers::<usize>::start("test", 1, [1], |_, _| panic!("of the test"));
        let error = all(&workers.unwrap(), 1).unwrap_err();
        assert_eq!(error.to_string(), "a thread of the test panicked");
    }

    #[test]
    fn drained_workers_end_what_they_have_begun() {
        let (started, starts) = channel();
        let work = move |job: usize, stop: &AtomicBool| {
            started.send(job)?;
            while !stop.load(Ordering::Acquire) {
                thread::yield_now();
            }
            Ok((job > 0).then_some(job))
        };
        let workers = Workers::start("test", 2, 0..9, work).unwrap();
        let first: Vec<usize> = starts.iter().take(2).collect();
        assert_eq!(first.iter().sum::<usize>(), 1, "{first:?}");
        assert_eq!(workers.drain(|| Ok(())).unwrap(), [1]);
        assert!(starts.recv().is_err());
    }

    #[test]
    fn errors_and_panics_end_a_drain() {
        fn error(
            work: impl Fn() -> Result<Option<()>> + Send + Sync + 'static,
            waiting: impl FnMut() -> Result<()>,
        ) -> String {
            let (started, starts) = channel();
            let work = move |(), _: &AtomicBool| {
                started.send(())?;
                work()
            };
            let workers = Workers::start("test", 1, [()], work).unwrap();
            starts.recv().unwrap();
            workers.drain(waiting).unwrap_err().to_string()
        }
        assert_eq!(error(|| bail!("one"), || Ok(())), "one");
        let panicked = error(|| panic!("of the test"), || Ok(()));
        assert_eq!(panicked, "a thread of the test panicked");
        let (_sender, never) = channel::<()>();
        let never = Mutex::new(never);
        let wait = move || Ok(never.lock().unwrap().recv().ok());
        assert_eq!(error(wait, || bail!("enough")), "enough");
    }

    #[test]
    fn dropped_workers_stop() {
        let (sender, stopped) = channel();
        let (started, starts) = channel();
        let wait = move |(), stop: &AtomicBool| -> Result<Option<()>> {
            started.send(())?;
            while !stop.load(Ordering::Acquire) {
                thread::yield_now();
            }
            sender.send(())?;
            Ok(None)
        };
        let workers = Workers::start("test", 1, [(); 2], wait).unwrap();
        starts.recv().unwrap();
        assert!(stopped.try_recv().is_err());
        drop(workers);
        stopped.recv().unwrap();
        // The second job is never started.
        assert!(starts.recv().is_err());
    }
}
