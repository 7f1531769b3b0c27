//! The devices that tests run on.

use std::io::Write;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use candle_core::Device;

static CPU: Device = Device::Cpu;

/// Held while a test runs on CUDA: tests have threads of their own, and these share one handle of cuBLAS.
static TURN: Mutex<()> = Mutex::new(());

/// The CPU, and CUDA where it is compiled in and a GPU answers.
pub fn devices() -> Devices {
    Devices {
        rest: [Some(&CPU), cuda().ok()].into_iter().flatten().collect(),
        turn: None,
    }
}

/// The iterator of [`devices`]. While it is at CUDA no other one is.
#[derive(Debug)]
pub struct Devices {
    rest: std::collections::VecDeque<&'static Device>,
    turn: Option<MutexGuard<'static, ()>>,
}

impl Iterator for Devices {
    type Item = &'static Device;

    fn next(&mut self) -> Option<Self::Item> {
        self.turn = None;
        let device = self.rest.pop_front()?;
        if device.is_cuda() {
            self.turn = Some(TURN.lock().unwrap_or_else(PoisonError::into_inner));
        }
        // Shown with a test that fails.
        println!("on {:?}", device.location());
        Some(device)
    }
}

/// The one CUDA device of this process, or why there is none.
///
/// Every call to Candle's constructor gives another device, and tensors of two do not mix. The stream is one of its own:
/// the default one is another in each thread.
pub fn cuda() -> Result<&'static Device, &'static str> {
    static CUDA: OnceLock<Result<Device, String>> = OnceLock::new();
    let cuda = CUDA.get_or_init(|| {
        if !candle_core::utils::cuda_is_available() {
            return Err("built without the feature cuda".to_owned());
        }
        Device::new_cuda_with_stream(0).map_err(|error| {
            let error = error.to_string();
            error.lines().next().unwrap_or_default().to_owned()
        })
    });
    cuda.as_ref().map_err(String::as_str)
}

/// Writes past the capture of a test's output whether the tests run on CUDA, or why they do not.
pub fn say_whether_on_cuda() -> std::io::Result<()> {
    let text = match cuda() {
        Ok(_) => "CUDA: tests run on it as well as on the CPU".to_owned(),
        Err(reason) => format!("CUDA: skipped, {reason}"),
    };
    writeln!(std::io::stderr(), "{text}")
}
