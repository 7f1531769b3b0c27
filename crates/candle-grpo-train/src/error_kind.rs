//! Error kinds.

use std::io;

use candle_core::Error as CandleError;
use candle_grpo_base::{Interrupted, find_invalid};
use candle_grpo_core::Invalid;
use candle_grpo_hub::TransferError;

use crate::NotFinite;

/// An error's kind, with the cause that determines it.
///
/// Functions return [`anyhow::Error`], whose message names the argument, its value and the
/// requirement. It keeps the errors that your own reward functions, generators and estimators
/// return: you can find them with [`anyhow::Error::downcast_ref`].
///
/// ```
/// use candle_grpo_train::{ErrorKind, TrainConfig};
///
/// let config = TrainConfig { num_generations: 0, ..TrainConfig::default() };
/// let error = config.validate().unwrap_err();
/// match ErrorKind::of(&error) {
///     ErrorKind::Invalid(invalid) => assert_eq!(invalid.field, "num_generations"),
///     ErrorKind::NotFinite(cause) => eprintln!("lower the learning rate: {cause}"),
///     ErrorKind::Interrupted => eprintln!("the run can go on from its last checkpoint"),
///     ErrorKind::Transfer(cause) => eprintln!("try again: {cause}"),
///     ErrorKind::Io(cause) => eprintln!("files: {cause}"),
///     _ => eprintln!("{error:#}"),
/// }
/// ```
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum ErrorKind<'a> {
    /// An option or argument is invalid.
    Invalid(&'a Invalid),
    /// A loss, gradient or weight is NaN or infinite.
    NotFinite(&'a NotFinite),
    /// The [`Progress`](crate::Progress) canceled the operation.
    Interrupted,
    /// A transfer from the Hugging Face hub failed. The same request may succeed later.
    Transfer(&'a TransferError),
    /// A file cannot be read or written, or a program or server cannot be reached.
    Io(&'a io::Error),
    /// Another error.
    Other,
}

impl<'a> ErrorKind<'a> {
    /// Returns the kind of `error`, whatever context it has.
    pub fn of(error: &'a anyhow::Error) -> Self {
        if let Some(invalid) = find_invalid(error) {
            return Self::Invalid(invalid);
        }
        let kind = |cause: &'a (dyn std::error::Error + 'static)| {
            if cause.is::<Interrupted>() {
                return Some(Self::Interrupted);
            }
            let not_finite = || cause.downcast_ref().map(Self::NotFinite);
            let transfer = || cause.downcast_ref().map(Self::Transfer);
            let io = || cause.downcast_ref().map(Self::Io);
            let in_candle_error = || find_io(cause.downcast_ref()?).map(Self::Io);
            not_finite()
                .or_else(transfer)
                .or_else(io)
                .or_else(in_candle_error)
        };
        error.chain().find_map(kind).unwrap_or(Self::Other)
    }
}

/// Returns the I/O error inside a Candle error, which is not in the chain of sources.
fn find_io(error: &CandleError) -> Option<&io::Error> {
    match error {
        CandleError::Io(error) => Some(error),
        CandleError::Context { inner, .. }
        | CandleError::WithPath { inner, .. }
        | CandleError::WithBacktrace { inner, .. } => find_io(inner),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::{Context, anyhow};

    #[test]
    fn the_kind_is_that_of_the_cause_in_any_context() {
        let kind = |error: anyhow::Error| format!("{:?}", ErrorKind::of(&error.context("step 3")));
        let invalid = Invalid::new("coef", 7, "be at most 1");
        let text = "Invalid(Invalid { field: \"coef\", value: \"7\", must: \"be at most 1\" })";
        assert_eq!(kind(invalid.clone().into()), text);
        assert_eq!(kind(CandleError::from(invalid).into()), text);
        assert_eq!(
            kind(NotFinite::new("loss").into()),
            format!("NotFinite({:?})", NotFinite::new("loss"))
        );
        assert_eq!(kind(Interrupted.into()), "Interrupted");
        assert_eq!(kind(anyhow!("coef: 7, must be at most 1")), "Other");
    }

    #[cfg(feature = "hub")]
    #[test]
    fn a_hub_that_keeps_failing_is_a_failed_transfer() {
        use candle_grpo_base::progress::NoProgress;
        use candle_grpo_hub::{Hub, HubContent, HubName};
        use candle_grpo_test_support::{FakeHub, Reply};
        use std::{path::Path, time::Duration};

        let server = FakeHub::start([]);
        server.set_change(|_, _| Reply::new(500, ""));
        let folder = tempfile::tempdir().unwrap();
        let hub = Hub {
            cache: folder.path().to_owned(),
            endpoint: server.url(),
            token: None,
            offline: None,
            first_pause: Duration::from_millis(1),
            answer_limit: Duration::MAX,
            unsized_limit: u64::MAX,
        };
        let name = HubName::of(Path::new("org/model")).unwrap().unwrap();
        let found = hub.locate(&name, HubContent::Model, None, &NoProgress);
        let error = found.unwrap_err().context("model");
        match ErrorKind::of(&error) {
            ErrorKind::Transfer(cause) => assert!(cause.to_string().contains("500"), "{cause}"),
            other => panic!("{other:?}: {error:?}"),
        }
    }

    #[test]
    fn a_file_that_is_not_there_is_found_in_errors_of_all_libraries() {
        let path = "no-such-folder/model.safetensors";
        let read = std::fs::read(path).context("model").unwrap_err();
        let load = candle_core::safetensors::load(path, &candle_core::Device::Cpu);
        let load = anyhow::Error::new(load.unwrap_err().with_path(path)).context("model");
        for error in [read, load] {
            match ErrorKind::of(&error) {
                ErrorKind::Io(cause) => assert_eq!(cause.kind(), io::ErrorKind::NotFound),
                other => panic!("{other:?}: {error:?}"),
            }
        }
    }
}
