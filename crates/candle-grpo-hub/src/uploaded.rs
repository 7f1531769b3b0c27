//! Options and results of uploads.

/// Options for an upload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UploadOptions {
    /// Creates a public repository, or uploads to one that exists. Otherwise a new repository is
    /// private, and a public one is an error.
    pub public: bool,
    /// The branch, which is created if it does not exist, or `refs/pr/N`. `None` means `main`.
    pub revision: Option<String>,
    /// The commit message.
    pub message: String,
}

impl Default for UploadOptions {
    fn default() -> Self {
        Self {
            public: false,
            revision: None,
            message: "Upload a model with candle-grpo".to_owned(),
        }
    }
}

/// A finished upload.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Uploaded {
    /// The URL of the repository, or of its branch.
    pub url: String,
    /// The branch's commit: 40 hexadecimal digits.
    pub commit: String,
    /// True if only the repository's owners can read it.
    pub is_private: bool,
    /// The files in the folder, ordered by path.
    pub files: Vec<UploadedFile>,
}

/// A file in an uploaded folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UploadedFile {
    /// Path in the repository.
    pub path: String,
    /// The size in bytes.
    pub bytes: u64,
    /// The way its contents reached the hub.
    pub transfer: Transfer,
}

/// The way a file's contents reached the hub.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Transfer {
    /// The upload sent them.
    Sent,
    /// The hub had them already.
    Present,
    /// The repository's `.gitignore` excludes the file.
    Ignored,
}
