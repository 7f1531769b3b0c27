//! Tests of the emulated CUDA driver in `kernels/host/driver`.
//!
//! An error on a stream breaks the driver of the process for good, as on a GPU. Tests of such
//! errors therefore run in a child process.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::ptr::null_mut;
use std::sync::OnceLock;

type Handle = *mut c_void;

unsafe extern "C" {
    fn cuda_host_calls(name: *const c_char) -> u64;
    fn cuDevicePrimaryCtxRetain(context: *mut Handle, device: c_int) -> c_int;
    fn cuCtxSetCurrent(context: Handle) -> c_int;
    fn cuCtxSynchronize() -> c_int;
    fn cuDeviceGetCount(count: *mut c_int) -> c_int;
    fn cuStreamCreate(stream: *mut Handle, flags: c_uint) -> c_int;
    fn cuStreamSynchronize(stream: Handle) -> c_int;
    fn cuStreamWaitEvent(stream: Handle, event: Handle, flags: c_uint) -> c_int;
    fn cuEventCreate(event: *mut Handle, flags: c_uint) -> c_int;
    fn cuEventRecord(event: Handle, stream: Handle) -> c_int;
    fn cuEventSynchronize(event: Handle) -> c_int;
    fn cuGraphInstantiateWithFlags(instance: *mut Handle, graph: Handle, flags: u64) -> c_int;
    fn cuGraphDestroy(graph: Handle) -> c_int;
    fn cuGraphExecDestroy(instance: Handle) -> c_int;
    fn cuGraphLaunch(instance: Handle, stream: Handle) -> c_int;
    fn cuStreamBeginCapture_v2(stream: Handle, mode: c_int) -> c_int;
    fn cuStreamEndCapture(stream: Handle, graph: *mut Handle) -> c_int;
    fn cuMemAllocAsync(pointer: *mut u64, bytes: usize, stream: Handle) -> c_int;
    fn cuMemAlloc_v2(pointer: *mut u64, bytes: usize) -> c_int;
    fn cuMemFree_v2(pointer: u64) -> c_int;
    fn cuMemFreeAsync(pointer: u64, stream: Handle) -> c_int;
    fn cuIpcGetMemHandle(handle: *mut MemoryHandle, pointer: u64) -> c_int;
    fn cuIpcOpenMemHandle_v2(pointer: *mut u64, handle: MemoryHandle, flags: c_uint) -> c_int;
    fn cuIpcCloseMemHandle(pointer: u64) -> c_int;
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> c_int;
    fn cuMemGetAllocationGranularity(
        granularity: *mut usize,
        properties: *const Properties,
        option: c_int,
    ) -> c_int;
    fn cuMemAddressReserve(
        start: *mut u64,
        bytes: usize,
        alignment: usize,
        address: u64,
        flags: u64,
    ) -> c_int;
    fn cuMemAddressFree(start: u64, bytes: usize) -> c_int;
    fn cuMemCreate(
        handle: *mut u64,
        bytes: usize,
        properties: *const Properties,
        flags: u64,
    ) -> c_int;
    fn cuMemRelease(handle: u64) -> c_int;
    fn cuMemMap(at: u64, bytes: usize, offset: usize, handle: u64, flags: u64) -> c_int;
    fn cuMemSetAccess(at: u64, bytes: usize, access: *const Access, count: usize) -> c_int;
    fn cuMemUnmap(at: u64, bytes: usize) -> c_int;
    fn cuDeviceGraphMemTrim(device: c_int) -> c_int;
    fn cuMemsetD8Async(to: u64, value: u8, bytes: usize, stream: Handle) -> c_int;
    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: Handle) -> c_int;
    fn cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, bytes: usize, stream: Handle) -> c_int;
    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, bytes: usize, stream: Handle) -> c_int;
    fn cuModuleLoadData(module: *mut Handle, image: *const c_char) -> c_int;
    fn cuModuleGetFunction(function: *mut Handle, module: Handle, name: *const c_char) -> c_int;
    fn cuFuncSetAttribute(function: Handle, attribute: c_int, value: c_int) -> c_int;
    fn cuLaunchKernel(
        function: Handle,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared_bytes: c_uint,
        stream: Handle,
        arguments: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) -> c_int;
    fn cublasCreate_v2(handle: *mut Handle) -> c_int;
    fn cublasSetStream_v2(handle: Handle, stream: Handle) -> c_int;
    fn cublasGemmEx(
        handle: Handle,
        op_a: c_int,
        op_b: c_int,
        m: c_int,
        n: c_int,
        k: c_int,
        alpha: *const c_void,
        a: u64,
        type_a: c_int,
        stride_a: c_int,
        b: u64,
        type_b: c_int,
        stride_b: c_int,
        beta: *const c_void,
        c: u64,
        type_c: c_int,
        stride_c: c_int,
        compute: c_int,
        algorithm: c_int,
    ) -> c_int;
}

/// `CUipcMemHandle`, which is passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
struct MemoryHandle([u8; 64]);

/// `CUmemLocation`: the type, which is 1 for a GPU, and its number.
type Location = [c_int; 2];

/// `CUmemAllocationProp`.
#[repr(C)]
struct Properties {
    kind: c_int,
    handle_types: c_int,
    location: Location,
    meta_data: *const c_void,
    flags: [u8; 8],
}

/// `CUmemAccessDesc`.
#[repr(C)]
struct Access {
    location: Location,
    flags: c_int,
}

const INVALID_VALUE: c_int = 1;
const INVALID_DEVICE: c_int = 101;
const INVALID_IMAGE: c_int = 200;
const INVALID_CONTEXT: c_int = 201;
const INVALID_HANDLE: c_int = 400;
const NOT_FOUND: c_int = 500;
const ILLEGAL_ADDRESS: c_int = 700;
const ASSERT: c_int = 710;
const LAUNCH_FAILED: c_int = 719;
const NOT_SUPPORTED: c_int = 801;

/// Memory is mapped in multiples of this number of bytes.
const GRANULARITY: usize = 4096;
/// Bytes of a range.
const RANGE: usize = 8 * GRANULARITY;

fn use_context() {
    use_device(0);
}

fn use_device(device: c_int) {
    let mut context = null_mut();
    // SAFETY: the pointer receives the context.
    unsafe {
        assert_eq!(cuDevicePrimaryCtxRetain(&mut context, device), 0);
        assert_eq!(cuCtxSetCurrent(context), 0);
    }
}

fn alloc(bytes: usize) -> u64 {
    let mut pointer = 0;
    // SAFETY: the pointer receives the address.
    assert_eq!(
        unsafe { cuMemAllocAsync(&mut pointer, bytes, null_mut()) },
        0
    );
    pointer
}

fn upload<T: Copy>(numbers: &[T]) -> u64 {
    let bytes = size_of_val(numbers);
    let to = alloc(bytes);
    // SAFETY: both sides have this many bytes.
    let result = unsafe { cuMemcpyHtoDAsync_v2(to, numbers.as_ptr().cast(), bytes, null_mut()) };
    assert_eq!(result, 0);
    to
}

fn download(from: u64, len: usize) -> Result<Vec<f32>, c_int> {
    let mut numbers = vec![0f32; len];
    let to = numbers.as_mut_ptr().cast();
    // SAFETY: `numbers` has this many bytes, and the driver checks the source.
    match unsafe { cuMemcpyDtoHAsync_v2(to, from, 4 * len, null_mut()) } {
        0 => Ok(numbers),
        error => Err(error),
    }
}

fn stream() -> Handle {
    let mut stream = null_mut();
    // SAFETY: the pointer receives the stream, which does not wait for the default stream.
    assert_eq!(unsafe { cuStreamCreate(&mut stream, 1) }, 0);
    stream
}

/// Returns the image of `src/wrong.cu`, which the replacement of nvcc compiles once. A child
/// process reads the image of its parent.
fn image() -> &'static CStr {
    static IMAGE: OnceLock<CString> = OnceLock::new();
    IMAGE.get_or_init(|| {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let output = folder.join("wrong.ptx");
        if !is_child() {
            // Another run of these tests may read the image meanwhile, so it is replaced whole.
            let new = folder.join(format!("wrong-{}.ptx", std::process::id()));
            let nvcc = || Command::new(here.join("../../kernels/host/bin/nvcc"));
            let status = nvcc()
                .arg("--ptx")
                .args(["-o".as_ref(), new.as_os_str()])
                .arg(here.join("src/wrong.cu"))
                .status()
                .unwrap();
            assert!(status.success());
            let preprocessed = new.with_extension("ii");
            let status = nvcc().arg("--races").arg(preprocessed).status().unwrap();
            assert!(status.success());
            std::fs::rename(new, &output).unwrap();
        }
        CString::new(std::fs::read(output).unwrap()).unwrap()
    })
}

/// Returns a kernel of `src/wrong.cu`.
fn kernel(name: &str) -> Result<Handle, c_int> {
    let (mut module, mut function) = (null_mut(), null_mut());
    let name = CString::new(name).unwrap();
    // SAFETY: the strings end with 0, and the pointers receive the handles.
    unsafe {
        assert_eq!(cuModuleLoadData(&mut module, image().as_ptr()), 0);
        match cuModuleGetFunction(&mut function, module, name.as_ptr()) {
            0 => Ok(function),
            error => Err(error),
        }
    }
}

/// Launches `name` with 64-bit arguments.
fn launch_on(
    stream: Handle,
    name: &str,
    (grid, block): ([u32; 3], [u32; 3]),
    shared_bytes: u32,
    arguments: &mut [u64],
) -> c_int {
    let function = kernel(name).unwrap();
    let mut pointers: Vec<*mut c_void> = arguments
        .iter_mut()
        .map(|argument| (&raw mut *argument).cast())
        .collect();
    // SAFETY: the kernels of wrong.cu have as many arguments as the tests pass, of 8 bytes at most.
    unsafe {
        cuLaunchKernel(
            function,
            grid[0],
            grid[1],
            grid[2],
            block[0],
            block[1],
            block[2],
            shared_bytes,
            stream,
            pointers.as_mut_ptr(),
            null_mut(),
        )
    }
}

fn launch(name: &str, grid: u32, block: u32, arguments: &mut [u64]) -> c_int {
    let shape = ([grid, 1, 1], [block, 1, 1]);
    launch_on(null_mut(), name, shape, 0, arguments)
}

fn is_child() -> bool {
    std::env::var_os("DRIVER_TEST_CHILD").is_some()
}

/// Runs `body` in a child process, in which the test of this name calls this function again.
fn in_child(test: &str, variables: &[(&str, &str)], body: impl FnOnce()) -> Option<Output> {
    if is_child() {
        use_context();
        body();
        return None;
    }
    image();
    let output = Command::new(std::env::current_exe().unwrap())
        .args([&format!("driver::{test}"), "--exact", "--nocapture"])
        .env("DRIVER_TEST_CHILD", "1")
        .envs(variables.iter().copied())
        .output()
        .unwrap();
    Some(output)
}

fn succeeds(output: Option<Output>) {
    if let Some(output) = output {
        assert!(output.status.success(), "{output:?}");
    }
}

/// The child must die with this message.
fn dies(output: Option<Output>, message: &str) {
    if let Some(output) = output {
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success(), "{text}");
        assert!(text.contains(message), "{text}");
    }
}

#[test]
fn new_memory_is_nan_and_copies_arrive() {
    use_context();
    let new = download(alloc(12), 3).unwrap();
    assert!(new.iter().all(|x| x.is_nan()), "{new:?}");
    let there = upload(&[1f32, 2., 3.]);
    assert_eq!(download(there + 4, 2).unwrap(), [2., 3.]);
}

#[test]
fn a_race_is_an_error_that_names_the_kernel_and_its_line() {
    let output = in_child(
        "a_race_is_an_error_that_names_the_kernel_and_its_line",
        &[("CUDA_ON_HOST_RACES", "1")],
        || {
            let x = upload(&[0f32; 64]);
            assert_eq!(launch("blocks", 2, 32, &mut [x]), 0);
            assert_eq!(launch("race_of_blocks", 2, 32, &mut [x]), ASSERT);
        },
    );
    if let Some(output) = output {
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{text}");
        assert!(
            text.contains("race_of_blocks: block (1, 0, 0): a race"),
            "{text}"
        );
        assert!(text.contains("at byte 0 of the 256 bytes"), "{text}");
        assert!(text.contains("(wrong.cu:"), "{text}");
    }
}

#[test]
fn a_launch_runs_each_thread_of_the_grid_once() {
    use_context();
    let x = upload(&(0..100).map(|i| i as f32).collect::<Vec<_>>());
    assert_eq!(launch("add_one", 2, 64, &mut [x, 100]), 0);
    let expected: Vec<f32> = (0..100).map(|i| i as f32 + 1.).collect();
    assert_eq!(download(x, 100).unwrap(), expected);
    assert_eq!(launch("add_one", 1, 64, &mut [x, 100]), 0);
    let both = download(x, 100).unwrap();
    assert_eq!((both[63], both[64]), (65., 65.));
}

#[test]
fn threads_meet_at_barriers() {
    use_context();
    let out = alloc(256);
    assert_eq!(launch("right_barrier", 1, 64, &mut [out]), 0);
    let expected: Vec<f32> = (0..64).map(|i| ((i + 63) % 64) as f32).collect();
    assert_eq!(download(out, 64).unwrap(), expected);
}

#[test]
fn launches_beyond_the_limits_are_refused() {
    use_context();
    let x = upload(&[0f32; 4]);
    let mut arguments = [x, x, 0];
    let mut refused = |name, grid, block, shared_bytes| {
        launch_on(
            null_mut(),
            name,
            (grid, block),
            shared_bytes,
            &mut arguments,
        )
    };
    for (grid, block) in [
        ([0, 1, 1], [32, 1, 1]),
        ([1, 0, 1], [32, 1, 1]),
        ([1, 1, 1], [0, 1, 1]),
        ([1, 65_536, 1], [1, 1, 1]),
        ([1, 1, 65_536], [1, 1, 1]),
        ([1 << 31, 1, 1], [1, 1, 1]),
        ([1, 1, 1], [1_025, 1, 1]),
        ([1, 1, 1], [1, 1, 65]),
    ] {
        let result = refused("add_one", grid, block, 0);
        assert_eq!(result, INVALID_VALUE, "{grid:?} {block:?}");
    }
    // `copy` has __launch_bounds__(64).
    assert_eq!(refused("copy", [1, 1, 1], [64, 1, 1], 0), 0);
    assert_eq!(refused("copy", [1, 1, 1], [65, 1, 1], 0), INVALID_VALUE);
    // More than 48 KiB of shared memory needs an attribute, up to 227 KiB.
    let function = kernel("copy").unwrap();
    assert_eq!(refused("copy", [1, 1, 1], [1, 1, 1], 48 << 10), 0);
    assert_eq!(
        refused("copy", [1, 1, 1], [1, 1, 1], (48 << 10) + 1),
        INVALID_VALUE
    );
    // SAFETY: the handle is a kernel.
    let set = |bytes| unsafe { cuFuncSetAttribute(function, 8, bytes) };
    assert_eq!(set((227 << 10) + 1), INVALID_VALUE);
    assert_eq!(set(227 << 10), 0);
}

#[test]
fn wrong_modules_and_names_are_refused() {
    use_context();
    let mut module = null_mut();
    let load = |module: &mut Handle, image: &CStr| {
        // SAFETY: the pointer receives the handle, and the image ends with 0.
        unsafe { cuModuleLoadData(module, image.as_ptr()) }
    };
    assert_eq!(load(&mut module, c".version 9.0"), INVALID_IMAGE);
    assert_eq!(
        load(&mut module, c"CUDA-ON-HOST loop /missing.so"),
        INVALID_IMAGE
    );
    assert_eq!(kernel("missing").unwrap_err(), NOT_FOUND);
}

#[test]
fn calls_without_a_context_are_refused() {
    let result = std::thread::spawn(|| {
        let mut pointer = 0;
        // SAFETY: the pointer receives the address.
        unsafe { cuMemAllocAsync(&mut pointer, 8, null_mut()) }
    });
    assert_eq!(result.join().unwrap(), INVALID_CONTEXT);
}

#[test]
fn wrong_sizes_and_pointers_of_memory_are_refused() {
    use_context();
    let mut pointer = 1;
    let freed = alloc(8);
    // SAFETY: the pointers receive addresses, and the driver checks the freed ones.
    unsafe {
        // The two functions differ on a GPU too.
        assert_eq!(cuMemAlloc_v2(&mut pointer, 0), INVALID_VALUE);
        assert_eq!(cuMemAllocAsync(&mut pointer, 0, null_mut()), 0);
        assert_eq!(pointer, 0);
        assert_eq!(cuMemFreeAsync(freed, null_mut()), 0);
        assert_eq!(cuMemFreeAsync(freed, null_mut()), INVALID_VALUE);
    }
}

fn properties() -> Properties {
    Properties {
        kind: 1,
        handle_types: 0,
        location: [1, 0],
        meta_data: null_mut(),
        flags: [0; 8],
    }
}

fn reserve() -> u64 {
    let mut start = 0;
    // SAFETY: the pointer receives the address.
    let result = unsafe { cuMemAddressReserve(&mut start, RANGE, 0, 0, 0) };
    assert_eq!(result, 0);
    start
}

fn create(bytes: usize) -> Result<u64, c_int> {
    let mut handle = 0;
    // SAFETY: the pointer receives the handle.
    match unsafe { cuMemCreate(&mut handle, bytes, &properties(), 0) } {
        0 => Ok(handle),
        error => Err(error),
    }
}

fn set_access(at: u64, bytes: usize, location: Location) -> c_int {
    let access = Access { location, flags: 3 };
    // SAFETY: there is one description.
    unsafe { cuMemSetAccess(at, bytes, &access, 1) }
}

/// Maps new memory, which its handle does not keep, to this address.
fn map(at: u64, bytes: usize) {
    let handle = create(bytes).unwrap();
    // SAFETY: the driver checks the address and the handle.
    unsafe {
        assert_eq!(cuMemMap(at, bytes, 0, handle, 0), 0);
        assert_eq!(cuMemRelease(handle), 0);
    }
    assert_eq!(set_access(at, bytes, [1, 0]), 0);
}

fn unmap(at: u64, bytes: usize) -> c_int {
    // SAFETY: the driver checks the address.
    unsafe { cuMemUnmap(at, bytes) }
}

fn free_memory() -> usize {
    let (mut free, mut total) = (0, 0);
    // SAFETY: the pointers receive the numbers.
    assert_eq!(unsafe { cuMemGetInfo_v2(&mut free, &mut total) }, 0);
    free
}

#[test]
fn mapped_memory_grows_in_its_range() {
    // Other tests allocate memory, too.
    let output = in_child("mapped_memory_grows_in_its_range", &[], || {
        let mut granularity = 0;
        // SAFETY: the pointer receives the number.
        let result = unsafe { cuMemGetAllocationGranularity(&mut granularity, &properties(), 0) };
        assert_eq!((result, granularity), (0, GRANULARITY));
        let before = free_memory();
        let start = reserve();
        assert_eq!(free_memory(), before);
        map(start, GRANULARITY);
        assert_eq!(free_memory(), before - GRANULARITY);
        assert!(
            download(start, GRANULARITY / 4)
                .unwrap()
                .iter()
                .all(|x| x.is_nan())
        );
        let numbers: Vec<f32> = (0..GRANULARITY / 4).map(|i| i as f32).collect();
        let from = numbers.as_ptr().cast();
        // SAFETY: both sides have this many bytes.
        let result = unsafe { cuMemcpyHtoDAsync_v2(start, from, GRANULARITY, null_mut()) };
        assert_eq!(result, 0);
        map(start + GRANULARITY as u64, 2 * GRANULARITY);
        assert_eq!(free_memory(), before - 3 * GRANULARITY);
        // Both mappings are one memory, with the content from before.
        let all = download(start, 3 * GRANULARITY / 4).unwrap();
        assert_eq!(all[..numbers.len()], numbers);
        assert!(all[numbers.len()..].iter().all(|x| x.is_nan()));
        synchronize(null_mut());
        assert_eq!(unmap(start + GRANULARITY as u64, 2 * GRANULARITY), 0);
        assert_eq!(free_memory(), before - GRANULARITY);
        assert_eq!(download(start, numbers.len()).unwrap(), numbers);
        synchronize(null_mut());
        assert_eq!(unmap(start, GRANULARITY), 0);
        assert_eq!(free_memory(), before);
        // The same addresses, with other memory.
        map(start, GRANULARITY);
        assert!(download(start, 4).unwrap().iter().all(|x| x.is_nan()));
        synchronize(null_mut());
        assert_eq!(unmap(start, GRANULARITY), 0);
        // SAFETY: nothing is mapped to the range.
        assert_eq!(unsafe { cuMemAddressFree(start, RANGE) }, 0);
    });
    succeeds(output);
}

#[test]
fn a_graph_gives_its_memory_back_until_it_runs() {
    let output = in_child("a_graph_gives_its_memory_back_until_it_runs", &[], || {
        let (pair, before) = (Pair::new(), free_memory());
        let (mut graph, mut instance) = (null_mut(), null_mut());
        let trim = || {
            // SAFETY: the device exists.
            assert_eq!(unsafe { cuDeviceGraphMemTrim(0) }, 0);
            before - free_memory()
        };
        // SAFETY: the pointers receive the handles and the address.
        unsafe {
            assert_eq!(cuStreamBeginCapture_v2(pair.producer, 0), 0);
            let mut pointer = 0;
            assert_eq!(cuMemAllocAsync(&mut pointer, 16, pair.producer), 0);
            copy(pair.x, pointer, pair.producer);
            copy(pointer, pair.y, pair.producer);
            assert_eq!(cuMemFreeAsync(pointer, pair.producer), 0);
            assert_eq!(cuStreamEndCapture(pair.producer, &mut graph), 0);
            assert_eq!(cuGraphInstantiateWithFlags(&mut instance, graph, 0), 0);
        }
        for run in 0..2 {
            // SAFETY: the handles are a graph and a stream.
            assert_eq!(unsafe { cuGraphLaunch(instance, pair.producer) }, 0);
            // Work that may still run uses the memory.
            assert_eq!(trim(), 16, "{run}");
            synchronize(pair.producer);
            assert_eq!(download(pair.y, 4).unwrap(), [1.; 4]);
            assert_eq!(trim(), 0, "{run}");
        }
        // SAFETY: the handles are graphs.
        unsafe {
            assert_eq!(cuGraphDestroy(graph), 0);
            assert_eq!(cuGraphExecDestroy(instance), 0);
        }
        assert_eq!(free_memory(), before);
    });
    succeeds(output);
}

#[test]
fn wrong_mappings_are_refused() {
    use_context();
    assert_eq!(create(GRANULARITY + 1), Err(INVALID_VALUE));
    let start = reserve();
    let (second, end) = (start + GRANULARITY as u64, start + RANGE as u64);
    let handle = create(GRANULARITY).unwrap();
    let map = |at, bytes, handle| {
        // SAFETY: the driver checks the address and the handle.
        unsafe { cuMemMap(at, bytes, 0, handle, 0) }
    };
    let free = |bytes| {
        // SAFETY: the driver checks the range.
        unsafe { cuMemAddressFree(start, bytes) }
    };
    // Not there, a gap, another size, another handle.
    for (at, bytes, handle) in [
        (end, GRANULARITY, handle),
        (second, GRANULARITY, handle),
        (start, 2 * GRANULARITY, handle),
        (start, GRANULARITY, handle + 1000),
    ] {
        assert_eq!(map(at, bytes, handle), INVALID_VALUE);
    }
    assert_eq!(unmap(start, GRANULARITY), INVALID_VALUE);
    assert_eq!(map(start, GRANULARITY, handle), 0);
    assert_eq!(map(second, GRANULARITY, handle), INVALID_VALUE);
    for (at, location) in [(second, [1, 0]), (start, [1, 1]), (start, [2, 0])] {
        assert_eq!(set_access(at, GRANULARITY, location), INVALID_VALUE);
    }
    assert_eq!(set_access(start, GRANULARITY, [1, 0]), 0);
    // SAFETY: the driver checks the address and the handle.
    unsafe {
        assert_eq!(cuMemFree_v2(start), INVALID_VALUE);
        assert_eq!(cuMemFreeAsync(start, null_mut()), INVALID_VALUE);
        let mut handle = MemoryHandle([0; 64]);
        assert_eq!(cuIpcGetMemHandle(&mut handle, start), INVALID_VALUE);
    }
    assert_eq!(unmap(start, 2 * GRANULARITY), INVALID_VALUE);
    assert_eq!(free(RANGE), INVALID_VALUE);
    assert_eq!(unmap(start, GRANULARITY), 0);
    // SAFETY: the driver checks the handle.
    let release = || unsafe { cuMemRelease(handle) };
    assert_eq!((release(), release()), (0, INVALID_VALUE));
    assert_eq!(free(RANGE - GRANULARITY), INVALID_VALUE);
    assert_eq!((free(RANGE), free(RANGE)), (0, INVALID_VALUE));
}

#[test]
fn a_copy_of_mapped_memory_needs_access_to_it() {
    let output = in_child("a_copy_of_mapped_memory_needs_access_to_it", &[], || {
        let start = reserve();
        map(start, GRANULARITY);
        let handle = create(GRANULARITY).unwrap();
        // SAFETY: the driver checks the address and the handle.
        let result = unsafe { cuMemMap(start + GRANULARITY as u64, GRANULARITY, 0, handle, 0) };
        assert_eq!(result, 0);
        assert!(download(start, GRANULARITY / 4).is_ok());
        assert_eq!(download(start, GRANULARITY / 4 + 1), Err(ILLEGAL_ADDRESS));
    });
    succeeds(output);
}

#[test]
fn a_kernel_that_uses_addresses_without_memory_ends_the_process() {
    for unmaps in ["0", "1"] {
        let variables = [("DRIVER_TEST_CASE", unmaps)];
        let name = "a_kernel_that_uses_addresses_without_memory_ends_the_process";
        let output = in_child(name, &variables, || {
            let start = reserve();
            let y = upload(&[0f32; 4]);
            let mut x = start + GRANULARITY as u64;
            map(start, GRANULARITY);
            if std::env::var("DRIVER_TEST_CASE").unwrap() == "1" {
                x = start;
                assert_eq!(unmap(start, GRANULARITY), 0);
            }
            launch("copy", 1, 4, &mut [x, y, 4]);
        });
        dies(output, "cuda_host: copy: memory outside of every buffer");
    }
}

#[test]
fn unmap_does_not_wait_for_work() {
    if let Ok(case) = std::env::var("DRIVER_TEST_CASE") {
        use_context();
        let (start, pair) = (reserve(), Pair::new());
        map(start, GRANULARITY);
        set(start, pair.producer);
        synchronize(pair.producer);
        if case == "reads" {
            copy(start, pair.y, pair.consumer);
        } else {
            add_one(start, pair.producer);
        }
        assert_eq!(unmap(start, GRANULARITY), ILLEGAL_ADDRESS);
        // SAFETY: the thread has a context.
        assert_eq!(unsafe { cuCtxSynchronize() }, ILLEGAL_ADDRESS);
        return;
    }
    for lazy in ["0", "1"] {
        for case in ["reads", "writes"] {
            let variables = [("DRIVER_TEST_CASE", case), ("CUDA_ON_HOST_LAZY", lazy)];
            succeeds(in_child("unmap_does_not_wait_for_work", &variables, || ()));
        }
    }
}

#[test]
fn a_gpu_can_be_without_mappings() {
    let variables = [("CUDA_ON_HOST_MAPS", "0")];
    let output = in_child("a_gpu_can_be_without_mappings", &variables, || {
        assert_eq!(create(GRANULARITY), Err(NOT_SUPPORTED));
    });
    succeeds(output);
}

fn open_memory(handle: MemoryHandle, flags: c_uint) -> Result<u64, c_int> {
    let mut pointer = 0;
    // SAFETY: the pointer receives the address, and the driver checks the handle.
    match unsafe { cuIpcOpenMemHandle_v2(&mut pointer, handle, flags) } {
        0 => Ok(pointer),
        error => Err(error),
    }
}

/// The part of the other process: opens the memory, changes it, and waits before it closes it.
fn open_in_child(text: &str) {
    let byte = |place: usize| u8::from_str_radix(&text[2 * place..][..2], 16).unwrap();
    let handle = MemoryHandle(std::array::from_fn(byte));
    assert_eq!(open_memory(handle, 0), Err(INVALID_VALUE));
    let opened = match open_memory(handle, 1) {
        Ok(opened) => opened,
        Err(error) => {
            println!("error {error}");
            return;
        }
    };
    assert_eq!(download(opened, 3), Ok(vec![1., 2., 3.]));
    assert_eq!(launch("add_one", 1, 2, &mut [opened, 2]), 0);
    assert_eq!(download(opened, 4), Err(ILLEGAL_ADDRESS));
    println!("open");
    std::io::stdin().read_line(&mut String::new()).unwrap();
}

#[test]
fn another_process_opens_memory() {
    const HANDLE: &str = "DRIVER_TEST_HANDLE";
    if let Ok(handle) = std::env::var(HANDLE) {
        use_context();
        return open_in_child(&handle);
    }
    use_context();
    let numbers = [1f32, 2., 3.];
    let (mut shared, mut handle) = (0, MemoryHandle([0; 64]));
    // SAFETY: the pointers receive an address and a handle, and the driver checks addresses.
    unsafe {
        assert_eq!(cuIpcGetMemHandle(&mut handle, alloc(12)), INVALID_VALUE);
        assert_eq!(cuMemAlloc_v2(&mut shared, 12), 0);
        let from = numbers.as_ptr().cast();
        assert_eq!(cuMemcpyHtoDAsync_v2(shared, from, 12, null_mut()), 0);
        assert_eq!(cuIpcGetMemHandle(&mut handle, shared), 0);
        assert_eq!(cuIpcCloseMemHandle(shared), INVALID_VALUE);
    }
    assert_eq!(open_memory(handle, 1), Err(INVALID_CONTEXT));
    image();
    let text: String = handle.0.iter().map(|byte| format!("{byte:02x}")).collect();
    let open = || {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "driver::another_process_opens_memory",
                "--exact",
                "--nocapture",
            ])
            .env(HANDLE, &text)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let is_answer = |line: &String| line.ends_with("open") || line.contains("error");
        let said = lines.by_ref().map(Result::unwrap).find(is_answer);
        (child, lines, said.unwrap_or_default())
    };
    let (mut child, lines, said) = open();
    assert!(said.ends_with("open"), "{said}");
    assert_eq!(download(shared, 3), Ok(vec![2., 3., 3.]));
    // SAFETY: nothing uses the memory.
    assert_eq!(unsafe { cuMemFree_v2(shared) }, INVALID_VALUE);
    // Its end closes the memory.
    drop(child.stdin.take());
    lines.for_each(drop);
    assert!(child.wait().unwrap().success());
    // SAFETY: as above.
    assert_eq!(unsafe { cuMemFree_v2(shared) }, 0);
    let (mut child, lines, said) = open();
    lines.for_each(drop);
    assert!(said.ends_with(&format!("error {INVALID_HANDLE}")), "{said}");
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_copy_that_is_out_of_bounds_breaks_the_context() {
    succeeds(in_child(
        "a_copy_that_is_out_of_bounds_breaks_the_context",
        &[],
        || {
            let x = upload(&[1f32, 2.]);
            assert_eq!(download(x, 3), Err(ILLEGAL_ADDRESS));
            assert_eq!(download(x, 2), Err(ILLEGAL_ADDRESS));
        },
    ));
}

#[test]
fn a_failed_assertion_breaks_the_context() {
    succeeds(in_child(
        "a_failed_assertion_breaks_the_context",
        &[],
        || {
            let ids = upload(&[0u32, 1, 7]);
            assert_eq!(launch("check_index", 1, 3, &mut [ids, 8]), 0);
            assert_eq!(launch("check_index", 1, 3, &mut [ids, 7]), ASSERT);
            assert_eq!(download(ids, 1), Err(ASSERT));
        },
    ));
}

#[test]
fn a_kernel_that_reads_out_of_bounds_ends_the_process() {
    let output = in_child(
        "a_kernel_that_reads_out_of_bounds_ends_the_process",
        &[],
        || {
            // An allocation of 4 numbers ends at an inaccessible page.
            let (from, to) = (upload(&[0f32; 4]), upload(&[0f32; 8]));
            launch("copy", 1, 5, &mut [from, to, 5]);
        },
    );
    dies(
        output,
        "cuda_host: copy: memory outside of every buffer, block (0, 0, 0), thread (4, 0, 0)",
    );
}

#[test]
fn use_after_free_ends_the_process() {
    let output = in_child("use_after_free_ends_the_process", &[], || {
        let (from, to) = (upload(&[0f32; 4]), upload(&[0f32; 4]));
        // SAFETY: the driver checks the pointer.
        assert_eq!(unsafe { cuMemFreeAsync(from, null_mut()) }, 0);
        // The memory is not used for another allocation.
        let other = upload(&[0f32; 4]);
        assert_ne!(from, other);
        launch("copy", 1, 4, &mut [from, to, 4]);
    });
    dies(output, "cuda_host: copy: memory outside of every buffer");
}

#[test]
fn a_lazy_stream_works_when_a_call_waits_for_it() {
    succeeds(in_child(
        "a_lazy_stream_works_when_a_call_waits_for_it",
        &[("CUDA_ON_HOST_LAZY", "1")],
        || {
            let Pair {
                producer,
                consumer,
                x,
                y,
            } = Pair::new();
            let z = upload(&[0f32; 4]);
            // SAFETY: device memory is memory of the host, and no thread writes it now.
            let now = |at: u64| unsafe { *(at as *const f32) };
            wait();
            add_one(x, producer);
            let event = record(producer);
            add_one(z, producer);
            wait_event(consumer, event);
            copy(x, y, consumer);
            assert_eq!([x, y, z].map(now), [1., 0., 0.], "nothing waits");
            synchronize(consumer);
            // The work after the event waits for its own stream.
            assert_eq!([x, y, z].map(now), [2., 2., 0.]);
            synchronize(producer);
            assert_eq!([x, y, z].map(now), [2., 2., 1.]);
        },
    ));
}

/// Two streams, and two tensors of 4 numbers that both may use at first.
struct Pair {
    producer: Handle,
    consumer: Handle,
    x: u64,
    y: u64,
}

impl Pair {
    fn new() -> Self {
        let pair = Self {
            producer: stream(),
            consumer: stream(),
            x: upload(&[1f32; 4]),
            y: upload(&[0f32; 4]),
        };
        wait();
        pair
    }
}

/// Waits for all streams.
fn wait() {
    // SAFETY: the thread has a context.
    assert_eq!(unsafe { cuCtxSynchronize() }, 0);
}

fn synchronize(stream: Handle) {
    // SAFETY: the handle is a stream.
    assert_eq!(unsafe { cuStreamSynchronize(stream) }, 0);
}

/// Records an event.
fn record(stream: Handle) -> Handle {
    let mut event = null_mut();
    // SAFETY: the pointer receives the event, and the handle is a stream.
    unsafe {
        assert_eq!(cuEventCreate(&mut event, 0), 0);
        assert_eq!(cuEventRecord(event, stream), 0);
    }
    event
}

fn wait_event(stream: Handle, event: Handle) {
    // SAFETY: the handles are a stream and an event.
    assert_eq!(unsafe { cuStreamWaitEvent(stream, event, 0) }, 0);
}

const FOUR_THREADS: ([u32; 3], [u32; 3]) = ([1, 1, 1], [4, 1, 1]);

fn add_one(x: u64, stream: Handle) -> c_int {
    launch_on(stream, "add_one", FOUR_THREADS, 0, &mut [x, 4])
}

fn copy(from: u64, to: u64, stream: Handle) -> c_int {
    launch_on(stream, "copy", FOUR_THREADS, 0, &mut [from, to, 4])
}

fn set(x: u64, stream: Handle) -> c_int {
    // SAFETY: the driver checks the memory.
    unsafe { cuMemsetD8Async(x, 0, 16, stream) }
}

/// The product of the first numbers of `a` and `b`, in `c`.
fn product(a: u64, b: u64, c: u64, stream: Handle) -> c_int {
    let (mut handle, one, zero) = (null_mut(), 1f32, 0f32);
    let (alpha, beta) = ((&raw const one).cast(), (&raw const zero).cast());
    // SAFETY: the pointer receives the handle, and the matrices have one element.
    unsafe {
        assert_eq!(cublasCreate_v2(&mut handle), 0);
        assert_eq!(cublasSetStream_v2(handle, stream), 0);
        cublasGemmEx(
            handle, 0, 0, 1, 1, 1, alpha, a, 0, 1, b, 0, 1, beta, c, 0, 1, 68, -1,
        )
    }
}

/// Work of two streams on the same memory, without an order between them, and the words of the
/// error. The last call returns it, or a later one in the lazy mode.
type Unordered = (&'static str, fn(&Pair), &'static str);

const UNORDERED: [Unordered; 13] = [
    (
        "a read after a write",
        |pair| {
            add_one(pair.x, pair.producer);
            copy(pair.x, pair.y, pair.consumer);
        },
        "copy on stream 3 reads",
    ),
    (
        "a write after a write",
        |pair| {
            add_one(pair.x, pair.producer);
            set(pair.x, pair.consumer);
        },
        "cuMemsetD8Async on stream 3 writes",
    ),
    (
        "a write after a read",
        |pair| {
            copy(pair.x, pair.y, pair.producer);
            add_one(pair.x, pair.consumer);
        },
        "and copy on stream 2 reads it",
    ),
    (
        "a write after a read of another stream than the last one",
        |pair| {
            let z = upload(&[0f32; 4]);
            synchronize(null_mut());
            copy(pair.x, pair.y, pair.producer);
            copy(pair.x, z, pair.consumer);
            add_one(pair.x, pair.consumer);
        },
        "and copy on stream 2 reads it",
    ),
    (
        "a part of an allocation",
        |pair| {
            set(pair.x, pair.producer);
            launch_on(
                pair.consumer,
                "copy",
                FOUR_THREADS,
                0,
                &mut [pair.x + 8, pair.y, 1],
            );
        },
        "copy on stream 3 reads",
    ),
    (
        "a free",
        |pair| {
            copy(pair.x, pair.y, pair.producer);
            // SAFETY: the driver checks the pointer.
            unsafe { cuMemFreeAsync(pair.x, pair.consumer) };
        },
        "cuMemFreeAsync on stream 3 writes",
    ),
    (
        "new memory",
        |pair| {
            let mut z = 0;
            // SAFETY: the pointer receives the address.
            assert_eq!(unsafe { cuMemAllocAsync(&mut z, 16, pair.producer) }, 0);
            set(z, pair.consumer);
        },
        "cuMemAllocAsync on stream 2 writes it",
    ),
    (
        "mapped memory",
        |pair| {
            let start = reserve();
            map(start, GRANULARITY);
            map(start + GRANULARITY as u64, GRANULARITY);
            set(start + GRANULARITY as u64, pair.producer);
            set(start, pair.consumer);
        },
        "cuMemsetD8Async on stream 3 writes",
    ),
    (
        "a copy to the host",
        |pair| {
            add_one(pair.x, pair.producer);
            let mut number = 0f32;
            let to = (&raw mut number).cast();
            // SAFETY: the number has 4 bytes.
            unsafe { cuMemcpyDtoHAsync_v2(to, pair.x, 4, pair.consumer) };
        },
        "cuMemcpyDtoHAsync_v2 on stream 3 reads",
    ),
    (
        "a product",
        |pair| {
            add_one(pair.x, pair.producer);
            product(pair.y, pair.x, pair.y, pair.consumer);
        },
        "product on stream 3 reads",
    ),
    (
        "work after an event",
        |pair| {
            add_one(pair.x, pair.producer);
            wait_event(pair.consumer, record(pair.producer));
            add_one(pair.x, pair.producer);
            copy(pair.x, pair.y, pair.consumer);
        },
        "copy on stream 3 reads",
    ),
    (
        "work after a wait of the host",
        |pair| {
            add_one(pair.x, pair.producer);
            synchronize(pair.producer);
            add_one(pair.x, pair.producer);
            copy(pair.x, pair.y, pair.consumer);
        },
        "copy on stream 3 reads",
    ),
    (
        "a recording",
        |pair| {
            let (mut graph, mut instance) = (null_mut(), null_mut());
            // SAFETY: the pointers receive the handles.
            unsafe {
                assert_eq!(cuStreamBeginCapture_v2(pair.consumer, 0), 0);
                add_one(pair.x, pair.consumer);
                assert_eq!(cuStreamEndCapture(pair.consumer, &mut graph), 0);
                assert_eq!(cuGraphInstantiateWithFlags(&mut instance, graph, 0), 0);
                assert_eq!(cuGraphLaunch(instance, pair.consumer), 0);
                synchronize(pair.consumer);
                set(pair.x, pair.producer);
                cuGraphLaunch(instance, pair.consumer);
            }
        },
        "add_one on stream 2 writes",
    ),
];

#[test]
fn work_without_an_order_is_an_error() {
    if let Ok(case) = std::env::var("DRIVER_TEST_CASE") {
        use_context();
        let (_, work, _) = UNORDERED.iter().find(|(name, ..)| *name == case).unwrap();
        work(&Pair::new());
        // SAFETY: the thread has a context.
        assert_eq!(unsafe { cuCtxSynchronize() }, LAUNCH_FAILED);
        return;
    }
    for lazy in ["0", "1"] {
        for (name, _, words) in UNORDERED {
            let variables = [("DRIVER_TEST_CASE", name), ("CUDA_ON_HOST_LAZY", lazy)];
            let output = in_child("work_without_an_order_is_an_error", &variables, || ());
            let output = output.unwrap();
            let text = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.success(), "{name}: {text}");
            let line = text.lines().find(|line| line.contains("no order: "));
            assert!(
                line.is_some_and(|line| line.contains(words)),
                "{name}: {text}"
            );
        }
    }
}

#[test]
fn a_table_of_addresses_needs_an_order_too() {
    let output = in_child("a_table_of_addresses_needs_an_order_too", &[], || {
        let pair = Pair::new();
        let list = upload(&[pair.y, pair.x]);
        synchronize(null_mut());
        add_one(pair.x, pair.producer);
        let shape = ([2, 1, 1], [4, 1, 1]);
        let result = launch_on(pair.consumer, "add_one_to_each", shape, 0, &mut [list]);
        assert_eq!(result, LAUNCH_FAILED);
    });
    succeeds(output);
}

#[test]
fn ordered_work_passes() {
    for lazy in ["0", "1"] {
        let variables = [("CUDA_ON_HOST_LAZY", lazy)];
        succeeds(in_child("ordered_work_passes", &variables, || {
            let (pair, third) = (Pair::new(), stream());
            let orders: [&dyn Fn(); 6] = [
                &|| wait_event(pair.consumer, record(pair.producer)),
                // Through a third stream.
                &|| {
                    wait_event(third, record(pair.producer));
                    wait_event(pair.consumer, record(third));
                },
                &|| synchronize(pair.producer),
                &wait,
                // SAFETY: the handle is an event.
                &|| assert_eq!(unsafe { cuEventSynchronize(record(pair.producer)) }, 0),
                // A thread that waits for a stream passes its results to this one.
                &|| {
                    let producer = pair.producer as usize;
                    let waits = move || synchronize(producer as Handle);
                    std::thread::spawn(waits).join().unwrap();
                },
            ];
            for (index, order) in orders.iter().enumerate() {
                assert_eq!(add_one(pair.x, pair.producer), 0, "{index}");
                order();
                // Two reads need no order.
                assert_eq!(copy(pair.x, pair.y, pair.consumer), 0, "{index}");
                let z = upload(&[0f32; 4]);
                synchronize(null_mut());
                assert_eq!(copy(pair.x, z, pair.producer), 0, "{index}");
                synchronize(pair.consumer);
                assert_eq!(download(pair.y, 1).unwrap(), [2. + index as f32]);
            }
            synchronize(pair.producer);
            // SAFETY: the driver checks the pointer.
            assert_eq!(unsafe { cuMemFreeAsync(pair.x, pair.consumer) }, 0);
        }));
    }
}

#[test]
fn there_are_as_many_devices_as_the_variable_has() {
    let count = || {
        let mut count = 0;
        // SAFETY: the pointer receives the number.
        assert_eq!(unsafe { cuDeviceGetCount(&mut count) }, 0);
        count
    };
    if !is_child() {
        assert_eq!(count(), 1);
    }
    let variables = [("CUDA_ON_HOST_DEVICES", "2")];
    let name = "there_are_as_many_devices_as_the_variable_has";
    succeeds(in_child(name, &variables, || {
        assert_eq!(count(), 2);
        let mut context = null_mut();
        // SAFETY: the pointer receives the context.
        let result = unsafe { cuDevicePrimaryCtxRetain(&mut context, 2) };
        assert_eq!(result, INVALID_DEVICE);
        let first = Pair::new();
        use_device(1);
        let second = Pair::new();
        assert_eq!(add_one(second.x, second.producer), 0);
        // The kernel and the context are those of the second device.
        assert_eq!(add_one(first.x, first.producer), INVALID_HANDLE);
        synchronize(second.producer);
        // SAFETY: both sides have 16 bytes.
        let result = unsafe { cuMemcpyDtoDAsync_v2(second.y, first.x, 16, second.producer) };
        assert_eq!(result, 0);
        synchronize(second.producer);
        assert_eq!(download(second.y, 1).unwrap(), [1.]);
        // A kernel has no access to the memory of another device.
        assert_eq!(add_one(first.x, second.producer), ILLEGAL_ADDRESS);
    }));
}

#[test]
fn calls_of_this_thread_are_counted() {
    use_context();
    let x = upload(&[0f32; 4]);
    // SAFETY: the names end with 0.
    let counts = || unsafe {
        [c"launch", c"launch:add_one", c"cuMemcpyDtoHAsync_v2"]
            .map(|name| cuda_host_calls(name.as_ptr()))
    };
    let before = counts();
    launch("add_one", 1, 4, &mut [x, 4]);
    launch("copy", 1, 4, &mut [x, x, 4]);
    download(x, 4).unwrap();
    std::thread::spawn(move || {
        use_context();
        download(x, 4)
    });
    assert_eq!(counts(), [before[0] + 2, before[1] + 1, before[2] + 1]);
}

#[test]
fn products_follow_transposes_strides_and_scalars() {
    use_context();
    let mut handle = null_mut();
    // SAFETY: the pointer receives the handle.
    assert_eq!(unsafe { cublasCreate_v2(&mut handle) }, 0);
    let (m, n, k) = (3, 2, 4);
    let value = |i: usize| ((i * 7 + 3) % 11) as f32 - 5.;
    let numbers = |len| (0..len).map(value).collect::<Vec<_>>();
    for (op_a, op_b, beta) in [(0, 0, 0f32), (1, 0, 2.), (0, 1, -1.), (1, 1, 0.5)] {
        // One element more than a column needs.
        let (stride_a, stride_b, stride_c) = ([m, k][op_a] + 1, [k, n][op_b] + 1, m + 1);
        let a = numbers(stride_a * [k, m][op_a]);
        let b = numbers(stride_b * [n, k][op_b]);
        let c = numbers(stride_c * n);
        let (alpha, on_device) = (1.5f32, upload(&c));
        // SAFETY: the strides and sizes are those of the matrices.
        let result = unsafe {
            cublasGemmEx(
                handle,
                op_a as c_int,
                op_b as c_int,
                m as c_int,
                n as c_int,
                k as c_int,
                (&raw const alpha).cast(),
                upload(&a),
                0,
                stride_a as c_int,
                upload(&b),
                0,
                stride_b as c_int,
                (&raw const beta).cast(),
                on_device,
                0,
                stride_c as c_int,
                68,
                -1,
            )
        };
        assert_eq!(result, 0);
        let mut expected = c.clone();
        for j in 0..n {
            for i in 0..m {
                let sum: f32 = (0..k)
                    .map(|l| {
                        let left = a[[i + l * stride_a, l + i * stride_a][op_a]];
                        let right = b[[l + j * stride_b, j + l * stride_b][op_b]];
                        left * right
                    })
                    .sum();
                expected[i + j * stride_c] = alpha * sum + beta * c[i + j * stride_c];
            }
        }
        assert_eq!(download(on_device, c.len()).unwrap(), expected);
    }
}
