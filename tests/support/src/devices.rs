//! Devices that tests run on.

use std::io::Write;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use candle_core::Device;

static CPU: Device = Device::Cpu;

/// Locked while a test runs on CUDA, because the threads of all tests share one cuBLAS handle.
static TURN: Mutex<()> = Mutex::new(());

/// Returns the CPU, and the GPU if the build has CUDA and a GPU is present.
pub fn devices() -> Devices {
    Devices {
        rest: [Some(&CPU), cuda().ok()].into_iter().flatten().collect(),
        turn: None,
    }
}

/// The iterator of [`devices`]. Only one iterator at a time is on the GPU.
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
        // The harness shows this line if the test fails.
        println!("on {:?}", device.location());
        Some(device)
    }
}

/// Returns the CUDA device of this process, or the reason why there is none.
///
/// There is only one: Candle's constructor creates a new device on each call, and tensors of two
/// devices do not mix. It has its own stream, because the default stream differs between threads.
///
/// In a build with CUDA, the first call writes to standard error whether the tests run on a GPU.
pub fn cuda() -> Result<&'static Device, &'static str> {
    static CUDA: OnceLock<Result<Device, String>> = OnceLock::new();
    let cuda = CUDA.get_or_init(|| {
        if !candle_core::utils::cuda_is_available() {
            return Err("built without the feature cuda".to_owned());
        }
        let device = Device::new_cuda_with_stream(0).map_err(|error| {
            let error = error.to_string();
            error.lines().next().unwrap_or_default().to_owned()
        });
        let line = match &device {
            Ok(_) => "CUDA: tests run on the GPU and on the CPU".to_owned(),
            Err(reason) => format!("CUDA: tests run on the CPU only: {reason}"),
        };
        // The test harness captures what `eprintln` writes, but not this. A closed stream is no
        // reason to fail a test.
        let _ = writeln!(std::io::stderr(), "{line}");
        device
    });
    cuda.as_ref().map_err(String::as_str)
}
