//! The time in which this process runs.

use std::sync::{LazyLock, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// The interval at which the clock of the process moves.
const TICK: Duration = Duration::from_millis(100);

/// A longer interval means that the process stood still: it was stopped, as by Ctrl-Z, a debugger
/// or `docker pause`, or the machine slept.
const STILL: Duration = Duration::from_secs(1);

/// Measures time without that in which the process stood still.
///
/// Deadlines of programs and servers use it. On the clock of the machine, all of them would have
/// passed when the process continues, although the answers may be there.
#[derive(Debug)]
struct Clock(Mutex<Reading>);

#[derive(Debug)]
struct Reading {
    at: Instant,
    time: Duration,
}

impl Clock {
    fn from(at: Instant) -> Self {
        let time = Duration::ZERO;
        Self(Mutex::new(Reading { at, time }))
    }

    /// Returns the time at `now`. It must be called more than once a second.
    fn time_at(&self, now: Instant) -> Duration {
        let mut reading = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let passed = now.saturating_duration_since(reading.at);
        reading.time += if passed > STILL { TICK } else { passed };
        reading.at = reading.at.max(now);
        reading.time
    }
}

/// Returns the time in which this process has run since the first call.
pub fn running_time() -> Duration {
    static CLOCK: LazyLock<Clock> = LazyLock::new(|| {
        // The thread ends with the process.
        thread::spawn(|| {
            loop {
                thread::sleep(TICK);
                running_time();
            }
        });
        Clock::from(Instant::now())
    });
    CLOCK.time_at(Instant::now())
}

/// A moment on two clocks: that of the machine and that of the process. For requests.
pub struct Beginning {
    at: Instant,
    time: Duration,
}

impl Beginning {
    /// Returns the present moment.
    pub fn now() -> Self {
        Self {
            at: Instant::now(),
            time: running_time(),
        }
    }

    /// Returns true if this process stood still since then.
    pub fn stood_still(&self) -> bool {
        let ran = running_time().saturating_sub(self.time);
        self.at.elapsed() > ran + STILL / 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_in_which_the_process_stood_still_does_not_count() {
        let begin = Instant::now();
        let clock = Clock::from(begin);
        let mut now = begin;
        let mut after = |milliseconds| {
            now += Duration::from_millis(milliseconds);
            clock.time_at(now).as_millis()
        };
        assert_eq!(after(0), 0);
        assert_eq!(after(700), 700);
        assert_eq!(after(1000), 1700);
        // Stopped for an hour, and once more.
        assert_eq!(after(3_600_000), 1800);
        assert_eq!(after(50), 1850);
        assert_eq!(after(6000), 1950);
        // A thread may have read the time of the machine before another one.
        assert_eq!(clock.time_at(begin).as_millis(), 1950);
        assert_eq!(after(10), 1960);
    }

    #[test]
    fn the_clock_of_the_process_goes_on() {
        let first = running_time();
        while running_time() == first {
            thread::yield_now();
        }
    }
}
