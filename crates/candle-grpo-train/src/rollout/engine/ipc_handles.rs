//! The arguments from which a process of a server with PyTorch opens memory of this process.

use candle_grpo_collective::MemoryHandle;

/// The version of PyTorch's handles in which the kind of the memory follows. Later versions of
/// PyTorch accept it.
const HANDLE_VERSION: u8 = 1;

/// The kind of memory from `cuMemAlloc`.
const HANDLE_KIND: u8 = b'c';

/// Returns a pickle of a dictionary. Its key is the UUID of the GPU, and its value the arguments of
/// PyTorch's `rebuild_cuda_tensor`, for a tensor of all `bytes` bytes of the memory.
pub(super) fn ipc_handles(handle: &MemoryHandle, bytes: usize) -> Vec<u8> {
    let mut memory = vec![HANDLE_VERSION, HANDLE_KIND];
    memory.extend(handle.memory);
    let mut pickle = Pickle::new();
    pickle.begin_dictionary();
    pickle.text(&uuid(&handle.device));
    pickle.tuple(|arguments| {
        arguments.global("torch", "Tensor");
        arguments.tuple(|size| size.integer(bytes));
        arguments.tuple(|stride| stride.integer(1));
        // The offset in the storage.
        arguments.integer(0);
        arguments.global("torch.storage", "TypedStorage");
        arguments.global("torch", "uint8");
        // The number of the GPU, for which the server sets its own.
        arguments.integer(0);
        arguments.bytes(&memory);
        arguments.integer(bytes);
        // The offset of the storage in the memory.
        arguments.integer(0);
        arguments.boolean(false);
        // A file with the number of readers. PyTorch ignores that there is none.
        arguments.bytes(b"/candle-grpo-none");
        arguments.integer(0);
        // An event to wait for: the memory is complete.
        arguments.bytes(b"");
        arguments.boolean(false);
    });
    pickle.end_dictionary()
}

/// Returns a GPU's UUID as PyTorch writes it.
fn uuid(bytes: &[u8; 16]) -> String {
    let mut text = String::new();
    for (place, byte) in bytes.iter().enumerate() {
        if [4, 6, 8, 10].contains(&place) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

/// A value in the format of Python's module `pickle`, protocol 3.
struct Pickle(Vec<u8>);

impl Pickle {
    fn new() -> Self {
        Self(vec![0x80, 3])
    }

    /// Begins a dictionary. One key and its value must follow.
    fn begin_dictionary(&mut self) {
        self.0.push(b'}');
    }

    /// Adds the key and the value to the dictionary, which is the whole pickle.
    fn end_dictionary(mut self) -> Vec<u8> {
        self.0.extend(*b"s.");
        self.0
    }

    fn tuple(&mut self, items: impl FnOnce(&mut Self)) {
        self.0.push(b'(');
        items(self);
        self.0.push(b't');
    }

    fn text(&mut self, text: &str) {
        self.0.push(b'X');
        self.length(text.len());
        self.0.extend(text.as_bytes());
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.0.push(b'B');
        self.length(bytes.len());
        self.0.extend(bytes);
    }

    /// Adds a length of texts and bytes. Those here are short.
    fn length(&mut self, length: usize) {
        let length = u32::try_from(length).unwrap_or(u32::MAX);
        self.0.extend(length.to_le_bytes());
    }

    fn integer(&mut self, value: usize) {
        match i32::try_from(value) {
            Ok(value) => {
                self.0.push(b'J');
                self.0.extend(value.to_le_bytes());
            }
            Err(_) => {
                // Nine bytes: the last one is the sign's.
                self.0.extend([0x8a, 9]);
                self.0.extend((value as u64).to_le_bytes());
                self.0.push(0);
            }
        }
    }

    fn boolean(&mut self, value: bool) {
        self.0.push(if value { 0x88 } else { 0x89 });
    }

    /// Adds a module's class or constant.
    fn global(&mut self, module: &str, name: &str) {
        self.0.extend(format!("c{module}\n{name}\n").as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::process::{Command, Stdio};

    /// Python's own reader, with stand-ins for the names of PyTorch.
    const READ: &str = r#"
import pickle, sys

class Reader(pickle.Unpickler):
    def find_class(self, module, name):
        return f"{module}.{name}"

handles = Reader(sys.stdin.buffer).load()
assert sys.stdin.buffer.read() == b"", "bytes after the end"
print(handles)
"#;

    fn read(pickle: &[u8]) -> String {
        let mut python = Command::new("python3")
            .args(["-I", "-S", "-c", READ])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdin = python.stdin.take().unwrap();
        stdin.write_all(pickle).unwrap();
        drop(stdin);
        let output = python.wait_with_output().unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stdout).unwrap()
    }

    #[test]
    fn python_reads_the_arguments() {
        let handle = MemoryHandle {
            memory: std::array::from_fn(|place| b'0' + place as u8),
            device: std::array::from_fn(|place| (place * 17) as u8),
        };
        let memory: String = handle.memory.iter().map(|&byte| byte as char).collect();
        let memory = memory.replace('\\', "\\\\");
        for bytes in [1, (1 << 31) - 1, 1 << 31, usize::MAX] {
            let expected = format!(
                "{{'00112233-4455-6677-8899-aabbccddeeff': ('torch.Tensor', ({bytes},), (1,), 0, 'torch.storage.TypedStorage', 'torch.uint8', 0, b'\\x01c{memory}', {bytes}, 0, False, b'/candle-grpo-none', 0, b'', False)}}\n"
            );
            assert_eq!(read(&ipc_handles(&handle, bytes)), expected);
        }
    }
}
