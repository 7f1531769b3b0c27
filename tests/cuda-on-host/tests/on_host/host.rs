//! Tests of the emulator: it detects wrong kernels, and shuffles like a GPU.

use candle_grpo_cuda_on_host::{Buffer, Grid, ORDERS, launch};

unsafe extern "C" {
    fn wrong_no_barrier(out: *mut f32);
    fn right_barrier(out: *mut f32);
    fn wrong_thread_leaves(out: *mut f32);
    fn wrong_lane_leaves(out: *mut f32);
    fn wrong_operations_differ(out: *mut f32);
    fn wrong_alignment(x: *const f32, out: *mut f32);
    fn wrong_shared_index(out: *mut f32);
    fn wrong_overflow(rows: i32, out: *mut f32);
    fn shuffles(out: *mut f32);
}

type Kernel = unsafe extern "C" fn(*mut f32);

/// Returns the number that each of 64 threads writes, or the error.
fn run(kernel: Kernel, order: u32) -> Result<Vec<f32>, String> {
    let mut out = Buffer::filled(-1f32, 64);
    let to = out.as_mut_ptr();
    // SAFETY: each of these kernels writes one number for each thread.
    unsafe { launch(Grid::new(1, 64), order, || kernel(to))? };
    Ok(out.to_vec())
}

#[test]
fn a_missing_barrier_shows_in_some_order() {
    let expected: Vec<f32> = (0..64).map(|i| ((i + 1) % 64) as f32).collect();
    let right = |kernel| ORDERS.map(|order| run(kernel, order).unwrap() == expected);
    assert_eq!(right(right_barrier), [true; 3]);
    assert!(right(wrong_no_barrier).contains(&false));
}

#[test]
fn an_error_names_threads_that_cannot_meet() {
    let error = run(wrong_thread_leaves, 0).unwrap_err();
    assert!(
        error.contains("waits at __syncthreads, but thread (5, 0, 0) has returned"),
        "{error}"
    );
    let error = run(wrong_lane_leaves, 0).unwrap_err();
    assert!(
        error.contains("waits at __shfl_xor_sync, but thread (31, 0, 0) has returned"),
        "{error}"
    );
    let error = run(wrong_operations_differ, 1).unwrap_err();
    assert!(
        error.contains("waits at __shfl_xor_sync, but thread (1, 0, 0) waits at __shfl_down_sync"),
        "{error}"
    );
}

#[test]
fn undefined_behavior_is_an_error_with_its_location() {
    let x = Buffer::filled(1f32, 8);
    let mut out = Buffer::filled(0f32, 1);
    let (from, to) = (x.as_ptr(), out.as_mut_ptr());
    // SAFETY: one thread reads in bounds of `x` and writes at most one number.
    let error = unsafe { launch(Grid::new(1, 1), 0, || wrong_alignment(from, to)) }.unwrap_err();
    assert!(
        error.contains("misaligned") && error.contains("wrong.cu:"),
        "{error}"
    );
    // SAFETY: one thread writes at most one number.
    let error = unsafe { launch(Grid::new(1, 1), 0, || wrong_overflow(40_000, to)) }.unwrap_err();
    assert!(error.contains("signed overflow"), "{error}");
    let error = run(wrong_shared_index, 0).unwrap_err();
    assert!(error.contains("index out of bounds"), "{error}");
}

#[test]
fn launches_that_a_gpu_refuses_are_errors() {
    for (grid, block) in [
        ([1, 65536, 1], [1, 1, 1]),
        ([1, 1, 1], [1025, 1, 1]),
        ([0, 1, 1], [32, 1, 1]),
    ] {
        let grid = Grid {
            grid,
            block,
            shared_bytes: 0,
        };
        // SAFETY: the closure does not call a kernel.
        assert!(unsafe { launch(grid, 0, || ()) }.is_err(), "{grid:?}");
    }
}

#[test]
fn shuffles_move_what_a_gpu_moves() {
    for order in ORDERS {
        let mut out = Buffer::filled(0f32, 5 * 64);
        let to = out.as_mut_ptr();
        // SAFETY: the buffer has five numbers for each of 64 threads.
        unsafe { launch(Grid::new(1, 64), order, || shuffles(to)) }.unwrap();
        for (thread, found) in out.chunks(5).enumerate() {
            let lane = thread % 32;
            let above = if lane < 28 { lane + 4 } else { lane };
            let below = lane.max(1) - 1;
            let part = lane / 8 * 8 + 3;
            let expected = [528, above, below, part, 16].map(|x| x as f32);
            assert_eq!(found, expected, "lane {lane}, order {order}");
        }
    }
}
