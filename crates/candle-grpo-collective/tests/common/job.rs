//! Processes that a test starts.

use std::io::Read;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Instant;

use candle_grpo_test_support::WATCHDOG;

use libtest_mimic::Failed;

/// A process that has ended.
pub(crate) struct Process {
    pub(crate) status: ExitStatus,
    /// Standard output and standard error.
    pub(crate) output: String,
}

/// A process, and the two parts of its output, each of which comes when its pipe closes.
struct Running(Child, [Receiver<String>; 2]);

/// Runs all commands at the same time.
///
/// # Errors
///
/// Fails if one cannot start, and if one has not ended within [`WATCHDOG`].
pub(crate) fn run(commands: Vec<Command>) -> Result<Vec<Process>, Failed> {
    let end = Instant::now() + WATCHDOG;
    let running: Vec<Running> = commands
        .into_iter()
        .map(start)
        .collect::<Result<_, Failed>>()?;
    let mut is_late = false;
    let mut ended = Vec::new();
    for Running(mut process, output) in running {
        let output = output.map(|part| {
            let rest = end.saturating_duration_since(Instant::now());
            part.recv_timeout(rest).or_else(|_| {
                is_late = true;
                process.kill()?;
                Ok::<_, Failed>(part.recv().unwrap_or_default())
            })
        });
        let [output, errors] = output;
        let (output, status) = (output? + &errors?, process.wait()?);
        ended.push(Process { status, output });
    }
    if is_late {
        let output: Vec<&str> = ended
            .iter()
            .map(|process| process.output.as_str())
            .collect();
        return Err(format!("not over within {WATCHDOG:?}:\n{}", output.join("\n")).into());
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

fn read(stream: Option<impl Read + Send + 'static>) -> Receiver<String> {
    let (sender, output) = channel();
    thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = stream.map(|mut stream| stream.read_to_end(&mut bytes));
        let _ = sender.send(String::from_utf8_lossy(&bytes).into_owned());
    });
    output
}

/// Returns an error with the output of a process, unless the condition holds.
///
/// # Errors
///
/// Fails unless the condition holds.
pub(crate) fn check(holds: bool, message: &str, process: &Process) -> Result<(), Failed> {
    if holds {
        Ok(())
    } else {
        Err(format!("{message}; {}:\n{}", process.status, process.output).into())
    }
}
