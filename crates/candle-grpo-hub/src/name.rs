//! Names of models and data sets on the hub.

use std::fmt;
use std::path::{Component, Path};

use anyhow::{Result, bail};

/// Prefix that marks a hub name.
const PREFIX: &str = "hf://";
/// First path parts that cannot be a hub account.
const RESERVED: [&str; 3] = ["datasets", "models", "spaces"];
/// Maximum length of an id part in bytes.
const MAX_PART: usize = 96;

/// Repository kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HubKind {
    /// A model.
    Model,
    /// A data set.
    Dataset,
}

/// The name of a repository on the hub, or of a file in it.
///
/// `[hf://]ORG/NAME[@REVISION][/FILE]` is a model, and `hf://datasets/ORG/NAME[@REVISION][/FILE]` a
/// data set. A revision is a branch, a tag, a commit, or `refs/pr/N`.
///
/// ```
/// use std::path::Path;
/// use candle_grpo_hub::HubName;
///
/// let name = HubName::of(Path::new("Qwen/Qwen2.5-0.5B-Instruct@main"))?.unwrap();
/// assert_eq!((name.id(), name.revision()), ("Qwen/Qwen2.5-0.5B-Instruct", Some("main")));
/// assert!(HubName::of(Path::new("models/smol"))?.is_none());
/// # Ok::<(), anyhow::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubName {
    kind: HubKind,
    id: String,
    revision: Option<String>,
    file: Option<String>,
}

impl HubName {
    /// Returns the model name in `path`, if it is one: it begins with `hf://`, or nothing exists at
    /// `path` and it is `ORG/NAME`, `ORG/NAME@REVISION`, or one of these with a GGUF file.
    ///
    /// # Errors
    ///
    /// If the path begins with `hf://` but is not a valid name.
    pub fn of(path: &Path) -> Result<Option<Self>> {
        let prefixed = Self::of_prefixed(path)?;
        let short = || {
            let name = path.to_str().and_then(Self::parse)?;
            // A path that exists is a path.
            (name.is_short() && !path.exists()).then_some(name)
        };
        Ok(prefixed.or_else(short))
    }

    /// Returns the name in `path` if it begins with `hf://`.
    ///
    /// # Errors
    ///
    /// If it begins with `hf://` but is not a valid name.
    pub fn of_prefixed(path: &Path) -> Result<Option<Self>> {
        let text = path.to_str().unwrap_or_default();
        let Some(name) = text.strip_prefix(PREFIX) else {
            return Ok(None);
        };
        match Self::parse(name) {
            Some(name) => Ok(Some(name)),
            None => bail!(
                "{text}: must be {PREFIX}ORG/NAME, {PREFIX}ORG/NAME@REVISION/FILE or {PREFIX}datasets/ORG/NAME@REVISION/FILE, where @REVISION and /FILE may be absent"
            ),
        }
    }

    /// The name of a cached file: `[datasets/]ORG/NAME/FILE`.
    pub fn of_cached(path: &Path) -> Option<String> {
        let parts = path.components().filter_map(|part| match part {
            Component::Normal(part) => part.to_str(),
            _ => None,
        });
        let parts: Vec<&str> = parts.collect();
        let at = parts.iter().rposition(|part| *part == "snapshots")?;
        let mut folder = parts.get(at.checked_sub(1)?)?.split("--");
        let kind = match folder.next()? {
            "models" => "",
            "datasets" => "datasets/",
            _ => return None,
        };
        let id = folder.collect::<Vec<_>>().join("/");
        let file = parts.get(at + 2..)?.join("/");
        (is_id(&id) && is_file(&file)).then(|| format!("{kind}{id}/{file}"))
    }

    fn parse(text: &str) -> Option<Self> {
        let (kind, text) = match text.strip_prefix("datasets/") {
            Some(rest) => (HubKind::Dataset, rest),
            None => (HubKind::Model, text),
        };
        let mut parts = text.split('/');
        let (org, name) = (parts.next()?, parts.next()?);
        let mut file: Vec<&str> = parts.collect();
        let (name, revision) = match name.split_once('@') {
            Some((name, revision)) => (name, Some(revision)),
            None => (name, None),
        };
        let revision = match (revision, file.as_slice()) {
            (Some("refs"), [kind @ ("pr" | "convert"), name, ..]) => {
                let revision = format!("refs/{kind}/{name}");
                file.drain(..2);
                Some(revision)
            }
            (revision, _) => revision.map(str::to_owned),
        };
        let name = Self {
            kind,
            id: format!("{org}/{name}"),
            revision,
            file: (!file.is_empty()).then(|| file.join("/")),
        };
        let is_valid = is_id(&name.id)
            && name.revision.as_deref().is_none_or(is_revision)
            && name.file.as_deref().is_none_or(is_file);
        is_valid.then_some(name)
    }

    /// Returns whether this is a name even without the prefix.
    fn is_short(&self) -> bool {
        let org = self.id.split('/').next().unwrap_or_default();
        self.kind == HubKind::Model
            && !RESERVED.contains(&org)
            && match &self.file {
                Some(file) => is_gguf(Path::new(file)),
                None => !is_gguf(Path::new(&self.id)),
            }
    }

    /// Repository kind.
    pub fn kind(&self) -> HubKind {
        self.kind
    }

    /// `ORG/NAME`.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The revision; `None` means the branch `main`.
    pub fn revision(&self) -> Option<&str> {
        self.revision.as_deref()
    }

    /// The file in the repository.
    pub fn file(&self) -> Option<&str> {
        self.file.as_deref()
    }

    /// The repository with its revision: `[datasets/]ORG/NAME[@REVISION]`.
    pub fn repository(&self) -> String {
        let kind = match self.kind {
            HubKind::Model => "",
            HubKind::Dataset => "datasets/",
        };
        match &self.revision {
            Some(revision) => format!("{kind}{}@{revision}", self.id),
            None => format!("{kind}{}", self.id),
        }
    }
}

impl fmt::Display for HubName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.repository())?;
        match &self.file {
            Some(file) => write!(f, "/{file}"),
            None => Ok(()),
        }
    }
}

/// Returns whether `id` is `ORG/NAME` by the hub's rules.
fn is_id(id: &str) -> bool {
    let is_part = |part: &str| {
        let ends = |end: char| part.starts_with(end) || part.ends_with(end);
        is_word(part)
            && part.len() <= MAX_PART
            && !(ends('.') || ends('-') || part.contains("--") || part.contains(".."))
    };
    id.split('/').count() == 2 && id.split('/').all(is_part)
}

pub(super) fn is_revision(revision: &str) -> bool {
    !revision.contains("..") && revision.split('/').all(is_word)
}

fn is_word(text: &str) -> bool {
    let is_in_word = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-' | '+');
    !text.is_empty() && text.chars().all(is_in_word)
}

/// Returns whether `file` is a path within a repository, and stays inside a folder on any system.
pub(super) fn is_file(file: &str) -> bool {
    let is_part = |part: &str| {
        !matches!(part, "" | "." | "..")
            && !part.contains(|c: char| c.is_control() || matches!(c, '\\' | ':'))
    };
    file.split('/').all(is_part)
}

/// Returns whether a path names a GGUF file: it ends in `.gguf`, in upper or lower case.
pub fn is_gguf(path: &Path) -> bool {
    path.extension()
        .is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    fn of(text: &str) -> Option<HubName> {
        HubName::of(Path::new(text)).unwrap()
    }

    #[rstest]
    #[case::id("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B", None, None)]
    #[case::revision("a/b@v1.0", "a/b", Some("v1.0"), None)]
    #[case::prefix("hf://a/b@main", "a/b", Some("main"), None)]
    #[case::gguf("a/b/c-Q8_0.gguf", "a/b", None, Some("c-Q8_0.gguf"))]
    #[case::capitals("a/b/C-Q8_0.GGUF", "a/b", None, Some("C-Q8_0.GGUF"))]
    #[case::both("a/b@v1/d/c.gguf", "a/b", Some("v1"), Some("d/c.gguf"))]
    #[case::pull_request(
        "hf://a/b@refs/pr/3/c d.bin",
        "a/b",
        Some("refs/pr/3"),
        Some("c d.bin")
    )]
    fn names_of_models(
        #[case] text: &str,
        #[case] id: &str,
        #[case] revision: Option<&str>,
        #[case] file: Option<&str>,
    ) {
        let name = of(text).unwrap();
        assert_eq!(name.kind(), HubKind::Model);
        assert_eq!(
            (name.id(), name.revision(), name.file()),
            (id, revision, file)
        );
        assert_eq!(name.to_string(), text.trim_start_matches(PREFIX));
    }

    #[test]
    fn data_sets_need_the_prefix() {
        let name = of("hf://datasets/openai/gsm8k@v1/main/train.jsonl").unwrap();
        assert_eq!(name.kind(), HubKind::Dataset);
        assert_eq!(name.repository(), "datasets/openai/gsm8k@v1");
        assert_eq!(name.file(), Some("main/train.jsonl"));
        assert_eq!(of("datasets/openai/gsm8k"), None);
    }

    #[rstest]
    #[case("model")]
    #[case("models/smol")]
    #[case("datasets/rows.jsonl")]
    #[case("target/models/SmolLM2")]
    #[case("./a/b")]
    #[case("../a")]
    #[case("/a/b")]
    #[case("~/a")]
    #[case("a/b.gguf")]
    #[case("a/B.GGUF")]
    #[case("a--b/c")]
    #[case("a/b@")]
    #[case("a/b@../c")]
    #[case("a/b/../c.gguf")]
    #[case("a/b c")]
    #[case("")]
    fn paths_are_not_names(#[case] text: &str) {
        assert_eq!(of(text), None);
    }

    #[test]
    fn a_path_that_exists_is_a_path_unless_it_has_the_prefix() {
        // Tests run in the crate's folder.
        assert_eq!(of("src/http"), None);
        assert_eq!(of("hf://src/http").unwrap().id(), "src/http");
    }

    #[rstest]
    #[case("hf://gpt2")]
    #[case("hf://a/b@")]
    #[case("hf://a/b@v/../../c")]
    #[case("hf://a/b//c")]
    #[case("hf://datasets/a")]
    fn a_wrong_name_with_the_prefix_is_an_error(#[case] text: &str) {
        let error = HubName::of(Path::new(text)).unwrap_err().to_string();
        assert!(
            error.starts_with(&format!("{text}: must be hf://ORG/NAME")),
            "{error}"
        );
    }

    #[test]
    fn files_in_the_cache_have_the_names_of_their_repositories() {
        let cached = |path: &str| HubName::of_cached(Path::new(path));
        assert_eq!(
            cached("/c/hub/models--a--b/snapshots/0123/d/config.json").unwrap(),
            "a/b/d/config.json"
        );
        assert_eq!(
            cached("x/datasets--a--b/snapshots/0123/rows.jsonl").unwrap(),
            "datasets/a/b/rows.jsonl"
        );
        for other in [
            "/models/a/config.json",
            "snapshots/0123/a",
            "/x/snapshots/0/a",
            "/models--a--b/snapshots/0",
        ] {
            assert_eq!(cached(other), None);
        }
    }
}
