//! The worker of a fake vLLM server that reads weights from memory of the policy, and memory in
//! files, for tests without a GPU.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use candle_core::{DType, Device, Error, Result, Tensor, bail};
use candle_grpo_collective::{MemoryHandle, SharedBuffer, SharedMemory};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::workers::{Announced, Digests, announced};

/// The program.
const PROGRAM: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/tests/train/engines/ipc_worker.py"
);

/// A process that opens the policy's memory, and what it has received.
#[derive(Clone)]
pub(crate) struct IpcWorker(Arc<Mutex<Worker>>);

struct Worker {
    /// The folder of memory in files. `None` for a GPU's.
    folder: Option<PathBuf>,
    process: Option<Process>,
    /// True once a request has set that messages have several weights.
    packed: bool,
    received: HashMap<String, Tensor>,
    digests: Digests,
    /// Lengths of all messages.
    messages: Vec<usize>,
    /// The number of messages before one that fails, once.
    fails_after: Option<usize>,
    /// True after an update that the worker has failed, until another one ends.
    has_failed: bool,
}

struct Process {
    child: Child,
    requests: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Drop for Process {
    fn drop(&mut self) {
        // It has ended if the test has.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl IpcWorker {
    pub(crate) fn new(folder: Option<&Path>) -> Self {
        Self(Arc::new(Mutex::new(Worker {
            folder: folder.map(Path::to_path_buf),
            process: None,
            packed: false,
            received: HashMap::new(),
            digests: Digests::new(),
            messages: Vec::new(),
            fails_after: None,
            has_failed: false,
        })))
    }

    fn lock(&self) -> MutexGuard<'_, Worker> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the process. The next request starts another one.
    pub(crate) fn restart(&self) {
        let mut worker = self.lock();
        worker.process = None;
        worker.packed = false;
        worker.has_failed = false;
    }

    /// Returns the SHA-256 of each weight of the last update.
    pub(crate) fn digests(&self) -> Digests {
        self.lock().digests.clone()
    }

    /// Returns the lengths of the messages since the last call.
    pub(crate) fn take_messages(&self) -> Vec<usize> {
        std::mem::take(&mut self.lock().messages)
    }

    pub(crate) fn init(&self, body: &Value) -> std::result::Result<(), String> {
        if body["init_info"] != json!({"packed": true}) {
            return Err(format!("Invalid init_info: {}", body["init_info"]));
        }
        self.lock().packed = true;
        Ok(())
    }

    pub(crate) fn start(&self) {
        let mut worker = self.lock();
        worker.received.clear();
        worker.digests.clear();
    }

    /// Lets the worker fail after this number of messages.
    pub(crate) fn fail_after(&self, messages: usize) {
        self.lock().fails_after = Some(messages);
    }

    /// Receives some of the weights. vLLM keeps the weights of an update that it has failed, and
    /// adds those of the next one, with wrong results. Here that is an error.
    pub(crate) fn receive(&self, body: &Value) -> std::result::Result<(), String> {
        let received = self.receive_message(body);
        self.lock().has_failed |= received.is_err();
        received
    }

    fn receive_message(&self, body: &Value) -> std::result::Result<(), String> {
        let info = &body["update_info"];
        let announced = announced(info)?;
        let mut worker = self.lock();
        if !worker.packed {
            return Err("not packed".to_owned());
        }
        if worker.has_failed {
            return Err("it has weights of a failed update".to_owned());
        }
        worker.fails_after = match worker.fails_after {
            Some(0) => {
                worker.fails_after = None;
                return Err("out of memory".to_owned());
            }
            left => left.map(|left| left - 1),
        };
        let weights = worker.ask(info)?;
        let mut bytes = 0;
        for weight in announced {
            let Announced { name, dtype, shape } = weight;
            let content = weights[&name].as_str().ok_or("no weight")?;
            let content = STANDARD.decode(content).map_err(|e| e.to_string())?;
            bytes += content.len();
            let digest = Sha256::digest(&content).to_vec();
            let tensor = Tensor::from_raw_buffer(&content, dtype, &shape, &Device::Cpu);
            let tensor = tensor.and_then(|tensor| tensor.to_dtype(DType::F32));
            let tensor = tensor.map_err(|e| e.to_string())?;
            if worker.digests.insert(name.clone(), digest).is_some() {
                return Err(format!("{name} has come twice"));
            }
            worker.received.insert(name, tensor);
        }
        worker.messages.push(bytes);
        Ok(())
    }

    /// Closes the memory, and returns the weights.
    pub(crate) fn finish(&self) -> std::result::Result<HashMap<String, Tensor>, String> {
        let mut worker = self.lock();
        worker.ask(&Value::Null)?;
        worker.has_failed = false;
        Ok(std::mem::take(&mut worker.received))
    }
}

impl Worker {
    /// Passes a request to the process.
    fn ask(&mut self, request: &Value) -> std::result::Result<Value, String> {
        let folder = self.folder.clone();
        let process = match &mut self.process {
            Some(process) => process,
            empty => empty.insert(start(folder.as_deref())),
        };
        writeln!(process.requests, "{request}").map_err(|e| e.to_string())?;
        let mut line = String::new();
        let read = process.answers.read_line(&mut line);
        read.map_err(|e| e.to_string())?;
        let mut answer: Value = serde_json::from_str(&line).map_err(|e| e.to_string())?;
        match answer["error"].as_str() {
            Some(error) => Err(error.to_owned()),
            None => Ok(answer["weights"].take()),
        }
    }
}

fn start(folder: Option<&Path>) -> Process {
    let mut child = Command::new("python3")
        .args(["-I", "-S", PROGRAM])
        .args(folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let (requests, answers) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    Process {
        child,
        requests,
        answers: BufReader::new(answers),
    }
}

/// Memory in the files of a folder.
#[derive(Clone)]
pub(crate) struct FileMemory {
    folder: PathBuf,
    next: Arc<AtomicU64>,
    /// Sizes of all buffers.
    sizes: Arc<Mutex<Vec<usize>>>,
    /// Number of buffers that were freed while another process had them open.
    freed_early: Arc<AtomicU64>,
}

impl FileMemory {
    pub(crate) fn new(folder: &Path) -> Self {
        Self {
            folder: folder.to_path_buf(),
            next: Arc::default(),
            sizes: Arc::default(),
            freed_early: Arc::default(),
        }
    }

    /// Sizes of all buffers.
    pub(crate) fn sizes(&self) -> Vec<usize> {
        let sizes = self.sizes.lock();
        sizes.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Number of buffers that were freed while another process had them open.
    pub(crate) fn freed_early(&self) -> u64 {
        self.freed_early.load(Ordering::SeqCst)
    }

    /// Number of buffers that are not freed.
    pub(crate) fn buffers(&self) -> usize {
        fs::read_dir(&self.folder).unwrap().count()
    }
}

impl SharedMemory for FileMemory {
    fn allocate(&self, bytes: usize) -> Result<Box<dyn SharedBuffer>> {
        let sizes = self.sizes.lock();
        sizes.unwrap_or_else(PoisonError::into_inner).push(bytes);
        let number = self.next.fetch_add(1, Ordering::SeqCst);
        let path = self.folder.join(number.to_string());
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create_new(true);
        let file = file.open(&path).map_err(Error::wrap)?;
        file.set_len(bytes as u64).map_err(Error::wrap)?;
        Ok(Box::new(FileBuffer {
            number,
            path,
            file,
            bytes,
            freed_early: Arc::clone(&self.freed_early),
        }))
    }
}

struct FileBuffer {
    number: u64,
    path: PathBuf,
    file: File,
    bytes: usize,
    freed_early: Arc<AtomicU64>,
}

impl SharedBuffer for FileBuffer {
    fn handle(&self) -> MemoryHandle {
        let mut handle = MemoryHandle {
            memory: [0; 64],
            device: [
                0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 0x11, 0x11, 0x11, 0x11, 0x11, 0x11,
            ],
        };
        handle.memory[..8].copy_from_slice(&self.number.to_le_bytes());
        handle
    }

    fn pack(&mut self, tensors: &[Tensor]) -> Result<()> {
        let mut bytes = Vec::new();
        for tensor in tensors {
            assert!(tensor.is_contiguous());
            tensor.write_bytes(&mut bytes)?;
        }
        if bytes.len() > self.bytes {
            bail!("{} bytes, must be at most {}", bytes.len(), self.bytes);
        }
        self.file.write_all_at(&bytes, 0).map_err(Error::wrap)
    }
}

impl Drop for FileBuffer {
    fn drop(&mut self) {
        let is_open = self.file.try_lock().is_err();
        self.freed_early
            .fetch_add(u64::from(is_open), Ordering::SeqCst);
        fs::remove_file(&self.path).unwrap();
    }
}
