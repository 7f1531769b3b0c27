//! Tests of the emulator: it detects wrong kernels, and shuffles like a GPU.

use candle_grpo_cuda_on_host::{Buffer, FINDS_RACES, Grid, ORDERS, launch};

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
    fn race_without_barrier(out: *mut f32);
    fn race_after_shuffle(out: *mut f32);
    fn after_barrier_of_lanes(out: *mut f32);
    fn after_barrier(out: *mut f32);
    fn race_of_blocks(out: *mut f32);
    fn blocks(out: *mut f32);
    fn race_before_own_wait(out: *mut f32);
    fn race_before_other_wait(out: *mut f32);
    fn own_copy(out: *mut f32);
    fn other_copy(out: *mut f32);
    fn race_with_atomic(out: *mut f32);
    fn atomics(out: *mut f32);
}

type Kernel = unsafe extern "C" fn(*mut f32);

/// Returns the number that each of 64 threads writes, or the error.
fn run(kernel: Kernel, order: u32) -> Result<Vec<f32>, String> {
    run_blocks(kernel, 1, order)
}

/// Divides the 64 threads into blocks.
fn run_blocks(kernel: Kernel, blocks: u32, order: u32) -> Result<Vec<f32>, String> {
    let mut out = Buffer::filled(-1f32, 64);
    let to = out.as_mut_ptr();
    // SAFETY: each of these kernels writes at most one number for each thread.
    unsafe { launch(Grid::new(blocks, 64 / blocks), order, || kernel(to))? };
    Ok(out.to_vec())
}

#[test]
fn a_missing_barrier_shows_in_some_order() {
    let expected: Vec<f32> = (0..64).map(|i| ((i + 63) % 64) as f32).collect();
    let others = ORDERS.into_iter().filter(|order| *order != FINDS_RACES);
    let is_right = |kernel, order| run(kernel, order).unwrap() == expected;
    assert!(ORDERS.iter().all(|order| is_right(right_barrier, *order)));
    assert!(
        !others
            .clone()
            .all(|order| is_right(wrong_no_barrier, order))
    );
    let error = run(wrong_no_barrier, FINDS_RACES).unwrap_err();
    assert!(error.contains("a race"), "{error}");
}

/// The kernel must have the same results in each order, and end with an error where races are
/// found. The error has all `parts`.
#[track_caller]
fn races(kernel: Kernel, blocks: u32, parts: &[&str]) {
    let results: Vec<_> = ORDERS
        .iter()
        .filter(|order| **order != FINDS_RACES)
        .map(|order| run_blocks(kernel, blocks, *order).unwrap())
        .collect();
    assert!(results.iter().all(|result| *result == results[0]));
    let error = run_blocks(kernel, blocks, FINDS_RACES).unwrap_err();
    assert!(error.contains("a race"), "{error}");
    for part in parts {
        assert!(error.contains(part), "{part}: {error}");
    }
}

#[test]
fn threads_that_no_barrier_orders_race() {
    let parts = [
        "thread (1, 0, 0) writes",
        "of static shared memory",
        "which thread (0, 0, 0) reads",
        "without a barrier",
    ];
    races(race_without_barrier, 1, &parts);
    races(race_without_barrier, 2, &parts);
    run(after_barrier, FINDS_RACES).unwrap();
}

#[test]
fn lanes_that_only_a_shuffle_orders_race() {
    races(race_after_shuffle, 2, &["without a barrier"]);
    run_blocks(after_barrier_of_lanes, 2, FINDS_RACES).unwrap();
    // It does not order two warps.
    races(after_barrier_of_lanes, 1, &["thread (63, 0, 0) reads"]);
}

#[test]
fn blocks_race_in_global_memory() {
    races(
        race_of_blocks,
        2,
        &[
            "block (1, 0, 0): a race: thread (0, 0, 0) writes global memory at 0x",
            "which thread (0, 0, 0) of block (0, 0, 0) writes",
        ],
    );
    run_blocks(race_of_blocks, 1, FINDS_RACES).unwrap();
    run_blocks(blocks, 2, FINDS_RACES).unwrap();
}

#[test]
fn a_copy_races_until_the_wait_for_it() {
    for kernel in [race_before_own_wait as Kernel, race_before_other_wait] {
        races(kernel, 1, &["asynchronously, without a wait"]);
    }
    run(own_copy, FINDS_RACES).unwrap();
    run(other_copy, FINDS_RACES).unwrap();
}

#[test]
fn atomics_race_only_with_other_accesses() {
    for blocks in [1, 2] {
        let found = run_blocks(atomics, blocks, FINDS_RACES).unwrap();
        assert_eq!(found[0], 63.);
        races(
            race_with_atomic,
            blocks,
            &["reads global", "atomically changes"],
        );
    }
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
