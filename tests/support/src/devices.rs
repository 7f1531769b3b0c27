//! Devices that tests run on.

use std::cell::{Cell, RefCell};
use std::io::Write;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use candle_core::Device;

use crate::CudaCalls;

static CPU: Device = Device::Cpu;

/// Locked while a test runs on CUDA, because the threads of all tests share one cuBLAS handle.
static TURN: Mutex<()> = Mutex::new(());

/// Returns the CPU, and the GPU if the build has CUDA and a GPU is present. If the variable
/// `CANDLE_GRPO_TEST_DEVICE` is `cuda`, the GPU alone: other tests cover the CPU.
///
/// From the moment that a test is on the GPU until its end, other tests wait for it.
pub fn devices() -> impl Iterator<Item = &'static Device> {
    let (cpu, gpu) = if is_on_cuda() {
        (None, Some(must_have_cuda()))
    } else {
        (Some(&CPU), cuda().ok())
    };
    [cpu, gpu].into_iter().flatten().inspect(|device| {
        if device.is_cuda() {
            take_turn();
        }
        // The harness shows this line if the test fails.
        println!("on {:?}", device.location());
    })
}

thread_local! {
    static STAYS_ON_CPU: Cell<bool> = const { Cell::new(false) };
}

/// Makes [`device`] return the CPU in this thread: for tests whose threads cannot share a GPU, and
/// for bits that only the CPU guarantees.
pub fn stay_on_cpu() {
    STAYS_ON_CPU.set(true);
}

/// Returns the device of tests that run on one device: the CPU, or the GPU if the variable
/// `CANDLE_GRPO_TEST_DEVICE` is `cuda`.
///
/// # Panics
///
/// Panics if the variable is `cuda` and there is no GPU, or if it has another value than `cuda` and
/// `cpu`.
pub fn device() -> &'static Device {
    if STAYS_ON_CPU.get() || !is_on_cuda() {
        return &CPU;
    }
    take_turn();
    must_have_cuda()
}

fn must_have_cuda() -> &'static Device {
    cuda().unwrap_or_else(|reason| panic!("CANDLE_GRPO_TEST_DEVICE: {reason}"))
}

/// Returns whether the tests are those of a GPU.
pub(crate) fn is_on_cuda() -> bool {
    match std::env::var("CANDLE_GRPO_TEST_DEVICE").as_deref() {
        Err(_) | Ok("cpu") => false,
        Ok("cuda") => true,
        Ok(other) => panic!("CANDLE_GRPO_TEST_DEVICE: {other:?}, must be cpu or cuda"),
    }
}

/// Returns true if the tests that take long run too: if the variable `CANDLE_GRPO_TEST_LONG` is 1.
///
/// # Panics
///
/// Panics if the variable has another value than 0 and 1.
pub fn is_long() -> bool {
    match std::env::var("CANDLE_GRPO_TEST_LONG").as_deref() {
        Err(_) | Ok("0") => false,
        Ok("1") => true,
        Ok(other) => panic!("CANDLE_GRPO_TEST_LONG: {other:?}, must be 0 or 1"),
    }
}

/// Returns the number of cases of a test: `few`, or `many` if the variable `CANDLE_GRPO_TEST_LONG`
/// is 1; a quarter if the GPU is emulated.
///
/// The variable `CANDLE_GRPO_TEST_CASES` is an upper limit, for tools that slow down each launch.
///
/// # Panics
///
/// Panics if `CANDLE_GRPO_TEST_CASES` is not a number, or `CANDLE_GRPO_TEST_LONG` neither 0 nor 1.
pub fn cases(few: u32, many: u32) -> u32 {
    let cases = if is_long() { many } else { few };
    let cases = match std::env::var("CANDLE_GRPO_TEST_CASES") {
        Ok(most) => match most.parse() {
            Ok(most) => cases.min(most),
            Err(_) => panic!("CANDLE_GRPO_TEST_CASES: {most:?}, must be a number"),
        },
        Err(_) => cases,
    };
    match CudaCalls::now() {
        Some(_) => cases.div_ceil(4),
        None => cases,
    }
}

/// Waits until no other test is on the GPU, and stays there until the end of this thread, which the
/// test harness starts for one test.
fn take_turn() {
    thread_local! {
        static MINE: RefCell<Option<MutexGuard<'static, ()>>> = const { RefCell::new(None) };
    }
    MINE.with_borrow_mut(|mine| {
        if mine.is_none() {
            *mine = Some(TURN.lock().unwrap_or_else(PoisonError::into_inner));
            list_test();
        }
    });
}

/// Returns the CUDA device of this process, or the reason why there is none.
///
/// In a build with CUDA, the first call writes to standard error whether the tests run on a GPU.
pub fn cuda() -> Result<&'static Device, &'static str> {
    static CUDA: OnceLock<Result<Device, String>> = OnceLock::new();
    let cuda = CUDA.get_or_init(|| {
        if !candle_core::utils::cuda_is_available() {
            return Err("built without the feature cuda".to_owned());
        }
        let device = candle_grpo_kernels::cuda_device(0).map_err(|error| {
            let error = error.to_string();
            error.lines().next().unwrap_or_default().to_owned()
        });
        let line = match &device {
            Ok(_) => "CUDA: tests run on the GPU".to_owned(),
            Err(reason) => format!("CUDA: tests run on the CPU only: {reason}"),
        };
        // The test harness captures what `eprintln` writes, but not this. A closed stream is no
        // reason to fail a test.
        let _ = writeln!(std::io::stderr(), "{line}");
        device
    });
    cuda.as_ref().map_err(String::as_str)
}

/// Adds the name of the test, which is the name of its thread, to the file of the variable
/// `CANDLE_GRPO_TEST_LOG`.
fn list_test() {
    let Some(path) = std::env::var_os("CANDLE_GRPO_TEST_LOG") else {
        return;
    };
    let program = std::env::args().next().unwrap_or_default();
    let program = program.rsplit('/').next().unwrap_or_default();
    let name = std::thread::current().name().unwrap_or("?").to_owned();
    let file = std::fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(path);
    file.and_then(|mut file| writeln!(file, "{program} {name}"))
        .expect("CANDLE_GRPO_TEST_LOG: must be a file that can be written");
}
