//! Processes that a test starts.

use std::io::Read;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use libtest_mimic::Failed;

/// A process that has ended.
pub(crate) struct Process {
    pub(crate) status: ExitStatus,
    /// Standard output and standard error.
    pub(crate) output: String,
}

struct Running(Child, [JoinHandle<String>; 2]);

/// Runs all commands at the same time.
///
/// # Errors
///
/// Fails if one cannot start, and if one has not ended within `bound`.
pub(crate) fn run(commands: Vec<Command>, bound: Duration) -> Result<Vec<Process>, Failed> {
    let end = Instant::now() + bound;
    let running: Vec<Running> = commands
        .into_iter()
        .map(start)
        .collect::<Result<_, Failed>>()?;
    let mut is_late = false;
    let mut ended = Vec::new();
    for Running(mut process, output) in running {
        let status = loop {
            match process.try_wait()? {
                Some(status) => break status,
                None if Instant::now() > end => {
                    is_late = true;
                    process.kill()?;
                    break process.wait()?;
                }
                None => thread::sleep(Duration::from_millis(20)),
            }
        };
        let output = output
            .map(|thread| thread.join().unwrap_or_default())
            .concat();
        ended.push(Process { status, output });
    }
    if is_late {
        let output: Vec<&str> = ended
            .iter()
            .map(|process| process.output.as_str())
            .collect();
        return Err(format!("not over within {bound:?}:\n{}", output.join("\n")).into());
    }
    Ok(ended)
}

fn start(mut command: Command) -> Result<Running, Failed> {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let program = command.get_program().to_string_lossy().into_owned();
    let mut process = command
        .spawn()
        .map_err(|error| format!("{program}: {error}"))?;
    let output = read(process.stdout.take());
    let errors = read(process.stderr.take());
    Ok(Running(process, [output, errors]))
}

fn read(stream: Option<impl Read + Send + 'static>) -> JoinHandle<String> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = stream.map(|mut stream| stream.read_to_end(&mut bytes));
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// Returns an error with the output of a process, unless the condition holds.
///
/// # Errors
///
/// Fails unless the condition holds.
pub(crate) fn check(holds: bool, message: &str, process: &Process) -> Result<(), Failed> {
    match holds {
        true => Ok(()),
        false => Err(format!("{message}; {}:\n{}", process.status, process.output).into()),
    }
}
