//! Measures collective operations on tensors as large as a model's gradients.
//!
//! ```sh
//! cargo build --release --locked -p candle-grpo-collective --features mpi --example collective_speed
//! mpirun -n 2 target/release/examples/collective_speed 135
//! ```
//!
//! The argument is how many million f32 values to use. For each operation, prints the median time
//! in seconds and the bandwidth per rank, which is the bytes that it must send divided by that
//! time.

use std::time::Instant;

use candle_core::{DType, Device, Result, Tensor, bail};
#[cfg(feature = "nccl")]
use candle_core::{Error, cuda_backend::cudarc::driver::CudaContext};
use candle_grpo_collective::{connect, launch};

/// Repetitions after the first, which does not count.
const REPETITIONS: usize = 7;

fn main() -> Result<()> {
    let millions: Option<usize> = match std::env::args().nth(1) {
        None => Some(1),
        Some(millions) => millions.parse().ok().filter(|millions| *millions > 0),
    };
    let Some(millions) = millions else {
        bail!("collective_speed: the argument must be a positive number of millions of f32");
    };
    let device = match launch::environment()? {
        #[cfg(feature = "nccl")]
        Some(rank) => {
            let visible = CudaContext::device_count().map_err(Error::wrap)?;
            Device::new_cuda_with_stream(rank.gpu(visible as usize)?)?
        }
        _ => Device::Cpu,
    };
    let ranks = connect(&device)?;
    let world_size = ranks.world_size();
    let elements = (millions * 1_000_000).next_multiple_of(world_size);
    let gradients = Tensor::zeros(elements, DType::F32, &device)?;
    let number = Tensor::zeros(world_size, DType::F32, &device)?;
    let part = 4.0 * elements as f64 * (world_size - 1) as f64 / world_size as f64;
    if ranks.rank() == 0 {
        println!("| operation, {world_size} ranks, {millions} M f32 | seconds | GB/s |");
        println!("| --- | ---: | ---: |");
    }
    let measure = |name: &str, bytes: f64, operation: &dyn Fn() -> Result<()>| -> Result<()> {
        let mut seconds = Vec::new();
        for _ in 0..=REPETITIONS {
            ranks.barrier()?;
            let start = Instant::now();
            operation()?;
            device.synchronize()?;
            seconds.push(start.elapsed().as_secs_f64());
        }
        let seconds = median(seconds.split_off(1));
        if ranks.rank() == 0 {
            println!("| {name} | {seconds:.6} | {:.2} |", bytes / seconds / 1e9);
        }
        Ok(())
    };
    let all = [&gradients];
    measure("all_reduce_sum", 2.0 * part, &|| ranks.all_reduce_sum(&all))?;
    measure("reduce_scatter_sum", part, &|| {
        ranks.reduce_scatter_sum(&all)
    })?;
    measure("all_gather", part, &|| ranks.all_gather(&all))?;
    measure("broadcast", part, &|| ranks.broadcast(&all, 0))?;
    measure("all_reduce_sum of one number", 0.0, &|| {
        ranks.all_reduce_sum(&[&number])
    })
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
