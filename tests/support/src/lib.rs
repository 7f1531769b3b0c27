//! What the tests of several crates share: the devices they run on, and how they compare.
//!
//! A test is written once, for whatever device it is given:
//!
//! ```
//! use candle_core::{Result, Tensor};
//! use candle_grpo_test_support::{assert_close, devices, numbers};
//!
//! fn a_sum() -> Result<()> {
//!     for device in devices() {
//!         let x = Tensor::new(&[1f32, 2.], device)?;
//!         assert_close(&numbers(&x.sum_all()?)?, &[3.], 1e-6);
//!     }
//!     Ok(())
//! }
//! # a_sum()?;
//! # Ok::<(), candle_core::Error>(())
//! ```

mod compare;
mod devices;

pub use compare::{assert_close, message, numbers};
pub use devices::{Devices, cuda, devices, say_whether_on_cuda};
