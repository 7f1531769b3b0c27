//! Groups of a sender with processes of another program, which use NCCL without this crate, as
//! vLLM's workers do. Each process is this test, started again.

#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{fs, ptr, thread};

use candle_core::cuda_backend::cudarc::driver::DevicePtr;
use candle_core::{DType, Device, Error, Result, Storage, Tensor, bail};
use candle_grpo_collective::{GroupId, NcclTransfer, TransferGroup, TransferTransport};
use candle_grpo_test_support::{cuda, message};
use libtest_mimic::Trial;

use super::Outcome;
use super::common::{check, run};

/// Lengths of the messages that a receiver expects. The last one is longer than the emulation's
/// buffer.
const MESSAGES: [usize; 3] = [21, 4, 300_001];

/// Process numbers, `INDEX`; the folder through which they pass identifiers, `FOLDER`.
pub(super) fn trials() -> Vec<Trial> {
    let trial = |name: &str, part: &'static str, receivers| {
        Trial::test(name, move || groups(part, receivers))
    };
    vec![
        trial("a_message_reaches_one_process", "send", 1),
        trial("messages_reach_all_processes", "send", 3),
        trial("a_killed_process_ends_its_group_alone", "send_again", 2),
        trial(
            "processes_that_do_not_join_are_an_error",
            "send_to_nobody",
            0,
        ),
    ]
}

/// Runs a sender, and receivers in its first group.
fn groups(part: &str, receivers: usize) -> Outcome {
    let folder = tempfile::tempdir()?;
    let program = std::env::current_exe()?;
    let command = |part: &str, index: usize| {
        let mut command = Command::new(&program);
        command.args(["rank", part]).env("FOLDER", folder.path());
        command.env("INDEX", index.to_string());
        command.env("RECEIVERS", receivers.to_string());
        command.env("CUDA_VISIBLE_DEVICES", index.to_string());
        command
    };
    let first = match part {
        "send_again" => "receive_and_end",
        _ => "receive",
    };
    let mut commands = vec![command(part, 0)];
    commands.extend((1..=receivers).map(|index| command(first, index)));
    if part == "send_again" {
        commands.extend((1..=receivers).map(|index| command("receive_second", index)));
    }
    for process in run(commands)? {
        check(process.status.success(), "a process failed", &process)?;
    }
    Ok(())
}

/// One process's work, if the part is one for these tests.
pub(super) fn process(part: &str) -> Option<Result<()>> {
    Some(match part {
        "send" => send(1).map(drop),
        "send_again" => send_again(),
        "send_to_nobody" => send_to_nobody(),
        "receive" => receive(1, MESSAGES.len()),
        "receive_and_end" => receive(1, 1),
        "receive_second" => receive(2, MESSAGES.len()),
        _ => return None,
    })
}

fn number(name: &str) -> usize {
    let value = std::env::var(name).unwrap_or_default();
    value
        .parse()
        .unwrap_or_else(|_| panic!("{name}: {value:?}"))
}

/// The file with the identifier of a group.
fn id_file(group: usize) -> PathBuf {
    let folder = std::env::var_os("FOLDER").expect("FOLDER");
    Path::new(&folder).join(format!("group-{group}"))
}

fn pass_on(id: &GroupId, group: usize) -> Result<()> {
    // The file appears once it is complete.
    let file = id_file(group);
    fs::write(file.with_extension("new"), id)?;
    Ok(fs::rename(file.with_extension("new"), file)?)
}

/// The bytes of a message.
fn bytes(message: usize) -> Vec<u8> {
    let byte = |index: usize| (index * 7 + index / 251 + message) as u8;
    (0..MESSAGES[message]).map(byte).collect()
}

/// Opens the group, and sends all messages.
fn send(group: usize) -> Result<Box<dyn TransferGroup>> {
    let device = cuda().map_err(Error::msg)?;
    let transport = NcclTransfer::new(device)?;
    let id = transport.new_id()?;
    pass_on(&id, group)?;
    let mut opened = transport.connect(&id, number("RECEIVERS"), &mut || Ok(()))?;
    for message in 0..MESSAGES.len() {
        send_message(&mut *opened, message, device, &mut || Ok(()))?;
    }
    Ok(opened)
}

/// Sends a message as several tensors: on the CPU, empty, and a part of another one.
fn send_message(
    group: &mut dyn TransferGroup,
    message: usize,
    device: &Device,
    waiting: &mut dyn FnMut() -> Result<()>,
) -> Result<()> {
    let bytes = bytes(message);
    let (first, rest) = bytes.split_at(4);
    let whole = [&[1, 2, 3], rest].concat();
    let (first, length) = (Tensor::new(first, &Device::Cpu)?, whole.len());
    let empty = Tensor::zeros(0, DType::F32, device)?;
    let mut tensors = vec![first, empty];
    if !rest.is_empty() {
        let whole = Tensor::from_vec(whole, length, device)?;
        tensors.push(whole.narrow(0, 3, length - 3)?);
    }
    group.pack(&tensors)?;
    group.send(waiting)
}

/// The receivers in the first group end after one message, without a word to the sender. It opens
/// another group.
fn send_again() -> Result<()> {
    let device = cuda().map_err(Error::msg)?;
    let transport = NcclTransfer::new(device)?;
    let id = transport.new_id()?;
    pass_on(&id, 1)?;
    let mut group = transport.connect(&id, number("RECEIVERS"), &mut || Ok(()))?;
    send_message(&mut *group, 0, device, &mut || Ok(()))?;
    let mut calls = 0;
    let sent = send_message(&mut *group, 1, device, &mut || {
        calls += 1;
        if calls > 3 {
            bail!("the receiver does not answer");
        }
        Ok(())
    });
    let text = message(sent);
    assert!(text.contains("the receiver does not answer"), "{text}");
    drop(group);
    send(2).map(drop)
}

fn send_to_nobody() -> Result<()> {
    let device = cuda().map_err(Error::msg)?;
    let transport = NcclTransfer::new(device)?;
    let id = transport.new_id()?;
    let mut calls = 0;
    let connected = transport.connect(&id, 2, &mut || {
        calls += 1;
        if calls > 3 {
            bail!("nobody has joined");
        }
        Ok(())
    });
    let text = message(connected.map(drop));
    assert!(text.contains("nobody has joined"), "{text}");
    assert!(text.contains("with NCCL 2."), "{text}");
    // The device is as before.
    let one = Tensor::ones(3, DType::F32, device)?;
    assert_eq!(one.sum_all()?.to_scalar::<f32>()?, 3.);
    let cpu = NcclTransfer::new(&Device::Cpu).map(drop);
    assert!(cpu.is_err());
    let ids = (transport.new_id()?, transport.new_id()?);
    assert_ne!(ids.0, ids.1);
    Ok(())
}

type Comm = *mut c_void;

/// Waits for the identifier, joins, and receives the first messages.
fn receive(group: usize, messages: usize) -> Result<()> {
    let id: GroupId = loop {
        if let Ok(id) = fs::read(id_file(group)) {
            break id.try_into().expect("128 bytes");
        }
        thread::yield_now();
    };
    let device = cuda().map_err(Error::msg)?;
    let stream = device.as_cuda_device()?.cuda_stream();
    // SAFETY: the types match nccl.h.
    unsafe {
        let library = libloading::Library::new("libnccl.so.2").map_err(Error::wrap)?;
        let init: libloading::Symbol<
            '_,
            unsafe extern "C" fn(*mut Comm, c_int, RawId, c_int) -> c_int,
        > = library.get(b"ncclCommInitRank\0").map_err(Error::wrap)?;
        type Sum = unsafe extern "C" fn(
            *const c_void,
            *mut c_void,
            usize,
            c_int,
            c_int,
            Comm,
            *mut c_void,
        ) -> c_int;
        let sum: libloading::Symbol<'_, Sum> =
            library.get(b"ncclAllReduce\0").map_err(Error::wrap)?;
        // The arguments of a broadcast have the same types: the root is in the place of the sum.
        let broadcast: libloading::Symbol<'_, Sum> =
            library.get(b"ncclBroadcast\0").map_err(Error::wrap)?;
        let mut comm = ptr::null_mut();
        let (rank, ranks) = (number("INDEX") as c_int, number("RECEIVERS") as c_int + 1);
        assert_eq!(init(&mut comm, ranks, RawId(id), rank), 0);
        let ones = Tensor::ones(1, DType::F32, device)?;
        let (floats, bytes_type, root) = (7, 1, 0);
        let (at, stream_of) = (address(&ones)?, stream.cu_stream().cast());
        assert_eq!(sum(at, at, 1, floats, 0, comm, stream_of), 0);
        assert_eq!(ones.to_vec1::<f32>()?, [ranks as f32]);
        for (message, &count) in MESSAGES.iter().enumerate().take(messages) {
            let received = Tensor::zeros(count, DType::U8, device)?;
            let at = address(&received)?;
            assert_eq!(
                broadcast(at, at, count, bytes_type, root, comm, stream_of),
                0
            );
            assert!(
                received.to_vec1::<u8>()? == bytes(message),
                "message {message}"
            );
        }
        // The library stays loaded, and the process ends without a word.
        std::mem::forget(library);
    }
    Ok(())
}

#[repr(C)]
struct RawId(GroupId);

fn address(tensor: &Tensor) -> Result<*mut c_void> {
    let (storage, _) = tensor.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else {
        bail!("not on a GPU");
    };
    let stream = storage.device.cuda_stream();
    let address = match tensor.dtype() {
        DType::F32 => storage.as_cuda_slice::<f32>()?.device_ptr(&stream).0,
        _ => storage.as_cuda_slice::<u8>()?.device_ptr(&stream).0,
    };
    Ok(address as *mut c_void)
}
