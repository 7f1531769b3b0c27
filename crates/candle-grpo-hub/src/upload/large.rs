//! Uploads to large file storage, with Git LFS's [batch
//! API](https://github.com/git-lfs/git-lfs/blob/main/docs/api/batch.md) and the hub's transfer in
//! parts.

use std::collections::BTreeMap;

use anyhow::anyhow;
use serde::Deserialize;
use serde_json::{Value, json};

use super::folder::LocalFile;
use super::{Upload, parsed};
use crate::Transfer;
use crate::client::{Failure, Refusal, TRIES, linked, shown};

const LFS: &str = "application/vnd.git-lfs+json";
const LFS_JSON: [(&str, &str); 2] = [("accept", LFS), ("content-type", LFS)];
/// The key of a part's size, in the headers of a transfer in parts.
const CHUNK_SIZE: &str = "chunk_size";
/// The hub's URL in responses that a mirror forwards.
const HUGGING_FACE: &str = "https://huggingface.co/";

#[derive(Debug, Deserialize)]
struct Batch {
    objects: Vec<Object>,
}

#[derive(Debug, Deserialize)]
struct Object {
    /// Absent if the storage has the contents.
    actions: Option<Actions>,
    error: Option<ObjectError>,
}

#[derive(Debug, Deserialize)]
struct ObjectError {
    #[serde(default)]
    code: u16,
    #[serde(default)]
    message: String,
}

#[derive(Debug, Deserialize)]
struct Actions {
    upload: Option<Action>,
    verify: Option<Action>,
}

#[derive(Debug, Deserialize)]
struct Action {
    href: String,
    #[serde(default)]
    header: BTreeMap<String, Value>,
}

impl Action {
    /// The headers of the request.
    fn headers(&self) -> Vec<(&str, &str)> {
        let headers = self.header.iter();
        headers
            .filter_map(|(name, value)| Some((name.as_str(), value.as_str()?)))
            .collect()
    }

    /// The size of a part, and the URL of each, if the transfer is in parts.
    fn parts(&self, size: u64) -> anyhow::Result<Option<(u64, Vec<&str>)>> {
        let Some(chunk) = self.header.get(CHUNK_SIZE) else {
            return Ok(None);
        };
        let bytes = match chunk {
            Value::String(text) => text.parse().ok(),
            number => number.as_u64(),
        };
        let Some(bytes) = bytes.filter(|&bytes| bytes > 0) else {
            return Err(anyhow!("{CHUNK_SIZE}: {chunk}, must be a number of bytes"));
        };
        let count = size.div_ceil(bytes);
        let urls = (1..=count).map_while(|part| self.header.get(&part.to_string())?.as_str());
        let urls: Vec<&str> = urls.collect();
        if urls.len() as u64 != count {
            return Err(anyhow!(
                "the hub sent URLs for {} parts, must be {count} parts of {bytes} bytes",
                urls.len()
            ));
        }
        Ok(Some((bytes, urls)))
    }
}

impl Upload<'_> {
    /// Sends a file to large file storage, unless it has the contents.
    pub(super) fn send_large(&self, file: &LocalFile, oid: &str) -> Result<Transfer, Failure> {
        let batch = format!("{}.git/info/lfs/objects/batch", self.page());
        let Some(actions) = self.actions(&batch, file, oid)? else {
            self.client.progress.advance(file.size as usize, 0);
            return Ok(Transfer::Present);
        };
        if let Some(upload) = &actions.upload {
            tracing::info!("uploading {} ({} bytes)", file.path, file.size);
            let url = self.link(&batch, &upload.href)?;
            match upload.parts(file.size).map_err(Failure::Other)? {
                None => {
                    self.send_part(&url, &upload.headers(), file, (0, file.size), &mut 0)?;
                }
                Some((bytes, urls)) => {
                    let etags = self.send_parts(&batch, file, bytes, &urls)?;
                    let parts = etags.iter().zip(1..);
                    let parts: Vec<Value> = parts
                        .map(|(etag, part)| json!({"partNumber": part, "etag": etag}))
                        .collect();
                    self.post_lfs(&url, &json!({"oid": oid, "parts": parts}))?;
                }
            }
        }
        if let Some(verify) = &actions.verify {
            let url = self.link(&batch, &verify.href)?;
            let body = json!({"oid": oid, "size": file.size});
            self.post(&url, &body)?;
        }
        Ok(Transfer::Sent)
    }

    /// Asks how to send a file. `None` means that the storage has it.
    fn actions(
        &self,
        batch: &str,
        file: &LocalFile,
        oid: &str,
    ) -> Result<Option<Actions>, Failure> {
        let body = json!({
            "operation": "upload",
            "transfers": ["basic", "multipart"],
            "objects": [{"oid": oid, "size": file.size}],
            "hash_algo": "sha256",
            "ref": {"name": self.revision},
        });
        let text = self.post_lfs(batch, &body)?;
        let found: Batch = parsed(batch, &text)?;
        let Some(object) = found.objects.into_iter().next() else {
            let message = "the response has no object, must have one";
            return Err(Failure::Other(anyhow!("{batch}: {message}")));
        };
        match object.error {
            Some(error) => Err(Failure::Refused(Refusal {
                status: error.code,
                code: String::new(),
                message: self.client.redacted(&error.message),
            })),
            None => Ok(object.actions),
        }
    }

    fn post_lfs(&self, url: &str, body: &Value) -> Result<Vec<u8>, Failure> {
        let body = body.to_string();
        self.client
            .with_retries(TRIES, || self.client.post(url, &LFS_JSON, body.as_bytes()))
    }

    /// The URL of a link in the response from `batch`. A mirror may forward the hub's links.
    fn link(&self, batch: &str, href: &str) -> Result<String, Failure> {
        let url = match href.strip_prefix(HUGGING_FACE) {
            Some(rest) => format!("{}/{rest}", self.hub.endpoint),
            None => href.to_owned(),
        };
        linked(batch, &url, "an upload link")
    }

    /// Sends a file in parts of `bytes` bytes, and returns their ETags. A part that fails is sent
    /// again alone.
    fn send_parts(
        &self,
        batch: &str,
        file: &LocalFile,
        bytes: u64,
        urls: &[&str],
    ) -> Result<Vec<String>, Failure> {
        let mut reported = 0;
        let parts = urls.iter().zip(0_u64..).map(|(url, part)| {
            let start = part * bytes;
            let size = bytes.min(file.size - start);
            let url = self.link(batch, url)?;
            let etag = self.send_part(&url, &[], file, (start, size), &mut reported)?;
            etag.filter(|etag| !etag.is_empty()).ok_or_else(|| {
                let part = part + 1;
                Failure::Other(anyhow!("the storage server sent no ETag for part {part}"))
            })
        });
        parts.collect()
    }

    /// Sends `size` bytes from `start` on, with retries, and returns the ETag.
    fn send_part(
        &self,
        url: &str,
        headers: &[(&str, &str)],
        file: &LocalFile,
        (start, size): (u64, u64),
        reported: &mut u64,
    ) -> Result<Option<String>, Failure> {
        let sent = self.client.with_retries(TRIES, || {
            let mut part = file.open(start, size, &self.client, reported)?;
            self.client.put(url, headers, &mut part, size)
        });
        match sent {
            // It never gets the token, which other statuses would put in question.
            Err(Failure::Refused(Refusal { status, .. })) if status != 413 => {
                Err(Failure::Other(anyhow!(
                    "{}: the storage server rejects it (status {status}); run the same command again, which asks for a new link",
                    shown(url)
                )))
            }
            sent => sent,
        }
    }
}
