//! Hub files: downloads, the cache, and server faults.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use candle_grpo_base::Interrupted;
use candle_grpo_base::progress::{NoProgress, Phase, Progress};
use candle_grpo_hub::{Hub, HubContent, HubName, Located, TransferError};
use candle_grpo_test_support::{ClosedPort, FakeHub, HubRepository, Reply, Request};
use rstest::rstest;
use serde_json::json;

const WEIGHTS: &str = "model.safetensors";

fn bytes(seed: u8, length: usize) -> Vec<u8> {
    (0..length)
        .map(|i| (i as u8).wrapping_mul(31) ^ seed ^ (i >> 8) as u8)
        .collect()
}

/// A model's files, with 700,000 bytes of weights.
fn model(seed: u8) -> Vec<(&'static str, Vec<u8>)> {
    vec![
        ("README.md", b"# Model".to_vec()),
        ("config.json", format!("{{\"seed\": {seed}}}").into_bytes()),
        ("generation_config.json", b"{}".to_vec()),
        ("tokenizer.json", bytes(seed, 3000)),
        (WEIGHTS, bytes(seed, 700_000)),
        ("pytorch_model.bin", bytes(seed, 10)),
    ]
}

/// A hub with the model `a/b`, and an empty cache.
struct Test {
    server: FakeHub,
    folder: tempfile::TempDir,
}

impl Test {
    fn new() -> Self {
        Self::with(HubRepository::new("a/b", model(1)))
    }

    fn with(repository: HubRepository) -> Self {
        Self {
            server: FakeHub::start([repository]),
            folder: tempfile::tempdir().unwrap(),
        }
    }

    fn hub(&self) -> Hub {
        Hub {
            cache: self.folder.path().join("hub"),
            endpoint: self.server.url(),
            token: None,
            offline: None,
            first_pause: Duration::from_millis(1),
            answer_limit: Duration::MAX,
            unsized_limit: u64::MAX,
        }
    }

    fn offline(&self) -> Hub {
        Hub {
            offline: Some("HF_HUB_OFFLINE"),
            ..self.hub()
        }
    }

    fn commit(&self) -> String {
        self.server.change_repository(0, |r| r.commit().to_owned())
    }

    fn repository(&self) -> PathBuf {
        self.folder.path().join("hub/models--a--b")
    }

    /// Writes a commit's file list, like the Python library.
    fn write_list(&self, commit: &str) {
        let files = model(1).into_iter();
        let files: BTreeMap<_, _> = files.map(|(name, _)| (name, json!({}))).collect();
        let trees = self.repository().join("trees");
        fs::create_dir_all(&trees).unwrap();
        let list = json!({"format_version": 1, "files": files});
        fs::write(trees.join(format!("{commit}.json")), list.to_string()).unwrap();
    }

    /// Partial downloads in the cache.
    fn parts(&self) -> usize {
        let blobs = fs::read_dir(self.repository().join("blobs"));
        let names = blobs
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| entry.file_name());
        names
            .filter(|name| name.to_string_lossy().contains("incomplete"))
            .count()
    }

    /// Interrupts the weights transfer `cuts` times.
    fn cut_weights(&self, mut cuts: usize) {
        self.server.set_change(move |request, reply| {
            if of_weights(request) && cuts > 0 {
                cuts -= 1;
                return reply.cut();
            }
            reply
        });
    }

    /// Checks that no weights are in the cache, whole or in part.
    fn assert_without_weights(&self) {
        assert_eq!(self.parts(), 0);
        let snapshot = self.repository().join("snapshots").join(self.commit());
        assert!(!snapshot.join(WEIGHTS).exists());
        let blobs = fs::read_dir(self.repository().join("blobs"));
        for blob in blobs.into_iter().flatten().flatten() {
            assert!(blob.metadata().unwrap().len() < 10_000, "{blob:?}");
        }
        assert!(!self.repository().join("refs/main").exists());
    }
}

fn name(text: &str) -> HubName {
    HubName::of(Path::new(text)).unwrap().unwrap()
}

fn locate(hub: &Hub, text: &str) -> anyhow::Result<Located> {
    hub.locate(&name(text), HubContent::Model, None, &NoProgress)
}

fn error(hub: &Hub, text: &str) -> anyhow::Error {
    locate(hub, text).unwrap_err()
}

/// Asserts that a folder's files are exactly a model's.
fn assert_model(folder: &Path, seed: u8) {
    let mut found: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .flatten()
        .map(|e| e.file_name())
        .collect();
    found.sort();
    let expected = [
        "config.json",
        "generation_config.json",
        WEIGHTS,
        "tokenizer.json",
    ];
    assert_eq!(found, expected);
    for (name, bytes) in model(seed) {
        if expected.contains(&name) {
            assert!(fs::read(folder.join(name)).unwrap() == bytes, "{name}");
        }
    }
}

/// Returns whether the request is for the weights' contents.
fn of_weights(request: &Request) -> bool {
    request.method == "GET" && request.target.contains("signature")
}

#[test]
fn a_model_is_downloaded_once_and_has_the_layout_of_the_python_library() {
    let test = Test::new();
    let located = locate(&test.hub(), "a/b").unwrap();
    let commit = test.commit();
    assert_eq!(located.commit, commit);
    assert_eq!(
        located.path,
        test.repository().join("snapshots").join(&commit)
    );
    assert_eq!(located.missing, []);
    assert_model(&located.path, 1);
    assert_eq!(
        fs::read_to_string(test.repository().join("refs/main")).unwrap(),
        commit
    );
    #[cfg(unix)]
    for file in ["config.json", WEIGHTS] {
        let link = fs::read_link(located.path.join(file)).unwrap();
        assert!(link.starts_with("../../blobs"), "{link:?}");
        assert!(
            test.repository()
                .join("blobs")
                .join(link.file_name().unwrap())
                .is_file()
        );
    }
    // For the list and four files.
    assert_eq!(test.server.downloads(), 6);
    assert_eq!(locate(&test.hub(), "a/b@main").unwrap(), located);
    assert_eq!(test.server.downloads(), 7);
    // Even for a commit, the hub is asked for its files, because another program may have skipped
    // some.
    fs::remove_file(located.path.join("generation_config.json")).unwrap();
    let at_commit = format!("a/b@{commit}");
    assert_eq!(locate(&test.hub(), &at_commit).unwrap(), located);
    assert_model(&located.path, 1);
    assert_eq!(test.server.downloads(), 8);
    // With a list, it needs no request.
    test.write_list(&commit);
    assert_eq!(locate(&test.hub(), &at_commit).unwrap(), located);
    assert_eq!(test.server.downloads(), 8);
    assert_eq!(locate(&test.offline(), "a/b").unwrap(), located);
}

#[test]
fn a_branch_that_has_moved_is_downloaded_and_a_commit_stays() {
    let test = Test::new();
    let first = locate(&test.hub(), "a/b").unwrap();
    let second = test.server.change_repository(0, |r| r.push(model(2)));
    let moved = locate(&test.hub(), "a/b").unwrap();
    assert_eq!(moved.commit, second);
    assert_model(&moved.path, 2);
    // A recorded commit overrides the revision, even if it is not in the cache.
    let kept = test.hub().locate(
        &name("a/b"),
        HubContent::Model,
        Some(&first.commit),
        &NoProgress,
    );
    assert_eq!(kept.unwrap(), first);
    let other = Test::new();
    other.server.change_repository(0, |r| r.push(model(2)));
    let kept = other.hub().locate(
        &name("a/b"),
        HubContent::Model,
        Some(&first.commit),
        &NoProgress,
    );
    assert_model(&kept.unwrap().path, 1);
    let branch = locate(&other.hub(), "a/b@refs/pr/1").unwrap();
    assert_model(&branch.path, 2);
    assert!(other.repository().join("refs/refs/pr/1").is_file());
}

#[test]
fn weights_in_several_files_are_those_of_the_index() {
    let index = json!({"weight_map": {"x": "model-1.safetensors", "y": "model-2.safetensors"}});
    let test = Test::with(HubRepository::new(
        "a/b",
        [
            ("config.json", b"{}".to_vec()),
            ("consolidated.safetensors", bytes(9, 10)),
            ("model-1.safetensors", bytes(1, 10)),
            ("model-2.safetensors", bytes(2, 10)),
            (
                "model.safetensors.index.json",
                index.to_string().into_bytes(),
            ),
            ("tokenizer.json", b"{}".to_vec()),
        ],
    ));
    let folder = locate(&test.hub(), "a/b").unwrap().path;
    assert_eq!(
        fs::read(folder.join("model-2.safetensors")).unwrap(),
        bytes(2, 10)
    );
    assert!(folder.join("model-1.safetensors").exists());
    assert!(!folder.join("consolidated.safetensors").exists());
    locate(&test.offline(), "a/b").unwrap();
    fs::remove_file(folder.join("model-2.safetensors")).unwrap();
    let error = error(&test.offline(), "a/b").to_string();
    assert!(error.contains("model-2.safetensors is missing."), "{error}");
}

#[test]
fn one_file_of_a_repository_is_a_model_or_data() {
    let gguf = ("q/m-Q8_0.gguf", bytes(1, 100));
    let test = Test::with(HubRepository::new("a/b", [gguf, ("README.md", vec![])]));
    let located = locate(&test.hub(), "a/b/q/m-Q8_0.gguf").unwrap();
    assert_eq!(fs::read(&located.path).unwrap(), bytes(1, 100));
    assert!(located.path.ends_with("q/m-Q8_0.gguf"));
    locate(&test.offline(), "a/b@main/q/m-Q8_0.gguf").unwrap();
    let downloads = test.server.downloads();
    locate(
        &test.hub(),
        &format!("a/b@{}/q/m-Q8_0.gguf", located.commit),
    )
    .unwrap();
    assert_eq!(test.server.downloads(), downloads);
    let rows = ("d/train.jsonl", b"{}".to_vec());
    let test = Test::with(HubRepository::new(
        "datasets/a/b",
        [rows, ("d/test.jsonl", vec![])],
    ));
    let data = |file: &str| {
        let name = name(&format!("hf://datasets/a/b/{file}"));
        test.hub()
            .locate(&name, HubContent::Data, None, &NoProgress)
    };
    let located = data("d/train.jsonl").unwrap();
    assert_eq!(fs::read(&located.path).unwrap(), b"{}");
    assert!(
        test.folder
            .path()
            .join("hub/datasets--a--b/refs/main")
            .is_file()
    );
    let error = data("d/tran.jsonl").unwrap_err().to_string();
    assert_eq!(
        error,
        "datasets/a/b/d/tran.jsonl: the repository has no file d/tran.jsonl; it has d/test.jsonl, d/train.jsonl"
    );
}

#[rstest]
#[case::data_set(
    "hf://datasets/a/b",
    HubContent::Model,
    "is a data set, must be a model"
)]
#[case::no_file(
    "hf://datasets/a/b",
    HubContent::Data,
    "must end in a file in the repository"
)]
#[case::not_gguf(
    "hf://a/b/model.safetensors",
    HubContent::Model,
    "model.safetensors, must be a GGUF file"
)]
fn a_name_of_the_wrong_content_is_refused_without_a_request(
    #[case] text: &str,
    #[case] content: HubContent,
    #[case] words: &str,
) {
    let test = Test::new();
    let error = test
        .hub()
        .locate(&name(text), content, None, &NoProgress)
        .unwrap_err();
    assert!(error.to_string().contains(words), "{error}");
    assert_eq!(test.server.downloads(), 0);
}

#[test]
fn without_weights_the_rest_is_downloaded_and_the_weights_are_listed() {
    let test = Test::new();
    let check = |hub: &Hub| {
        hub.locate(
            &name("a/b"),
            HubContent::ModelWithoutWeights,
            None,
            &NoProgress,
        )
    };
    let located = check(&test.hub()).unwrap();
    assert!(located.path.join("tokenizer.json").is_file());
    let [missing] = located.missing.as_slice() else {
        panic!("{located:?}");
    };
    assert_eq!(
        (missing.file.as_str(), missing.bytes),
        (WEIGHTS, Some(700_000))
    );
    test.assert_without_weights();
    assert!(check(&test.offline()).is_err());
    locate(&test.hub(), "a/b").unwrap();
    assert_eq!(check(&test.hub()).unwrap().missing, []);
}

#[test]
fn the_token_is_sent_to_the_hub_alone() {
    let test = Test::with(HubRepository::new("a/b", model(1)).with_token("hf_secret", false));
    let hub = Hub {
        token: Some("hf_secret".to_owned()),
        ..test.hub()
    };
    locate(&hub, "a/b").unwrap();
    let sent = |requests: Vec<Request>| {
        requests
            .iter()
            .filter(|r| r.header("authorization").is_some())
            .count()
    };
    assert_eq!(
        sent(test.server.api.requests()),
        test.server.api.requests().len()
    );
    assert!(!test.server.storage.requests().is_empty());
    assert_eq!(sent(test.server.storage.requests()), 0);
}

#[test]
fn redirects_within_the_hub_are_followed_with_the_token() {
    let test = Test::with(HubRepository::new("a/new", model(1)).with_token("hf_secret", false));
    test.server.set_change(|request, reply| {
        if request.target.contains("a/old") {
            Reply::new(307, "").with_header("location", request.target.replace("a/old", "a/new"))
        } else {
            reply
        }
    });
    let hub = Hub {
        token: Some("hf_secret".to_owned()),
        ..test.hub()
    };
    let located = locate(&hub, "a/old").unwrap();
    assert_model(&located.path, 1);
}

#[rstest]
#[case::absent(
    None,
    false,
    "hf://a/c",
    "http",
    "no such repository, or it is private; no token is given: set HF_TOKEN"
)]
#[case::private(
    None,
    false,
    "hf://a/b",
    "http",
    "no such repository, or it is private; no token is given: set HF_TOKEN"
)]
#[case::private_with_token(
    Some("hf_other"),
    false,
    "hf://a/b",
    "http",
    "the token in HF_TOKEN, or in the file `token` in HF_HOME, has no access"
)]
#[case::gated(
    None,
    true,
    "hf://a/b",
    "/a/b;",
    "access is restricted: accept its conditions on"
)]
#[case::revision(Some("hf_secret"), false, "hf://a/b@v2", "404", "has no revision v2")]
fn a_refusal_says_what_to_do(
    #[case] token: Option<&str>,
    #[case] is_gated: bool,
    #[case] text: &str,
    #[case] also: &str,
    #[case] words: &str,
) {
    let test = Test::with(HubRepository::new("a/b", model(1)).with_token("hf_secret", is_gated));
    let hub = Hub {
        token: token.map(str::to_owned),
        ..test.hub()
    };
    let error = error(&hub, text);
    assert!(!error.is::<TransferError>());
    let error = format!("{error:#}");
    assert!(error.contains(words) && error.contains(also), "{error}");
    assert!(
        !error.contains("hf_secret") && !error.contains("hf_other"),
        "{error}"
    );
    test.assert_without_weights();
}

#[test]
fn busy_and_failing_servers_are_asked_again() {
    let test = Test::new();
    let failures = Arc::new(Mutex::new(BTreeMap::<String, usize>::new()));
    let counts = Arc::clone(&failures);
    test.server.set_change(move |request, reply| {
        // The hub's and the storage server's would add up.
        if of_weights(request) {
            return reply;
        }
        let mut counts = counts.lock().unwrap();
        let count = counts
            .entry(format!("{} {}", request.method, request.path()))
            .or_default();
        *count += 1;
        match *count {
            1 => Reply::new(429, "").with_header("retry-after", 0),
            2 => Reply::new(500, ""),
            3 => Reply::new(503, ""),
            4 => Reply::closed(),
            _ => reply,
        }
    });
    assert_model(&locate(&test.hub(), "a/b").unwrap().path, 1);
    assert!(failures.lock().unwrap().values().all(|&count| count >= 5));
}

#[test]
fn retry_after_is_waited_for() {
    let test = Test::new();
    let mut first = true;
    test.server.set_change(move |_, reply| {
        if std::mem::take(&mut first) {
            Reply::new(429, "").with_header("retry-after", 1)
        } else {
            reply
        }
    });
    let begun = std::time::Instant::now();
    locate(&test.hub(), "a/b").unwrap();
    assert!(begun.elapsed() >= Duration::from_secs(1));
}

#[test]
fn a_server_that_keeps_failing_is_given_up() {
    let test = Test::new();
    test.server.set_change(|request, reply| {
        if of_weights(request) {
            Reply::new(500, "")
        } else {
            reply
        }
    });
    let error = error(&test.hub(), "a/b");
    assert!(error.is::<TransferError>());
    let error = error.to_string();
    assert!(
        error.contains("status 500") && error.contains("`hf download a/b`"),
        "{error}"
    );
    let storage = test.server.storage.requests();
    assert_eq!(
        storage.iter().filter(|request| of_weights(request)).count(),
        5
    );
    test.assert_without_weights();
}

#[test]
fn a_broken_transfer_continues_where_it_ended() {
    let test = Test::new();
    test.cut_weights(3);
    assert_model(&locate(&test.hub(), "a/b").unwrap().path, 1);
    let requests = test.server.storage.requests();
    let ranges: Vec<_> = requests.iter().map(|r| r.header("range")).collect();
    let expected = [
        None,
        Some("bytes=350000-"),
        Some("bytes=525000-"),
        Some("bytes=612500-"),
    ];
    assert_eq!(ranges, expected);
}

/// More interruptions than attempts, each with progress.
#[test]
fn a_transfer_may_break_off_often_as_long_as_it_proceeds() {
    let test = Test::new();
    test.cut_weights(12);
    assert_model(&locate(&test.hub(), "a/b").unwrap().path, 1);
}

#[rstest]
#[case::whole_file(200, None)]
#[case::other_range(206, Some("bytes 0-699999/700000"))]
#[case::no_range(206, None)]
#[case::out_of_range(416, None)]
fn a_server_without_ranges_sends_the_file_from_its_beginning(
    #[case] status: u16,
    #[case] range: Option<&'static str>,
) {
    let test = Test::new();
    let mut requests = 0;
    test.server.set_change(move |request, reply| {
        if !of_weights(request) {
            return reply;
        }
        requests += 1;
        match (requests, status) {
            (1, _) => reply.cut(),
            (2, 416) => Reply::new(416, ""),
            (2, status) => {
                let reply = Reply::new(status, bytes(1, 700_000));
                range.into_iter().fold(reply, |reply, range| {
                    reply.with_header("content-range", range)
                })
            }
            _ => reply,
        }
    });
    assert_model(&locate(&test.hub(), "a/b").unwrap().path, 1);
}

/// A small file, whose etag the server itself sends. It is not hashed.
#[test]
fn a_file_that_has_changed_in_the_middle_is_not_joined() {
    let test = Test::new();
    let mut requests = 0;
    test.server.set_change(move |request, reply| {
        if request.method == "HEAD" || !request.path().ends_with("tokenizer.json") {
            return reply;
        }
        requests += 1;
        match requests {
            1 => reply.cut(),
            2 => reply.with_header("etag", "\"other\""),
            _ => reply,
        }
    });
    assert_model(&locate(&test.hub(), "a/b").unwrap().path, 1);
    let requests = test.server.api.requests();
    let of_file = requests
        .iter()
        .filter(|r| r.method == "GET" && r.path().ends_with("tokenizer.json"));
    let ranges: Vec<_> = of_file.map(|request| request.header("range")).collect();
    assert_eq!(ranges, [None, Some("bytes=1500-"), None]);
}

#[rstest]
#[case::hash(bytes(2, 700_000), "SHA-256")]
#[case::longer(bytes(1, 700_001), "bytes, must be 700000")]
#[case::shorter(
    bytes(1, 699_999),
    "the transfer was interrupted after 699999 bytes: the file has 700000"
)]
fn other_contents_than_announced_are_refused(#[case] sent: Vec<u8>, #[case] words: &str) {
    let test = Test::new();
    test.server.set_change(move |request, reply| {
        match (of_weights(request), request.header("range")) {
            (true, None) => Reply::new(200, sent.clone()),
            (true, Some(_)) => Reply::new(416, ""),
            _ => reply,
        }
    });
    let error = error(&test.hub(), "a/b");
    assert!(error.is::<TransferError>(), "{error:?}");
    assert!(error.to_string().contains(words), "{error}");
    test.assert_without_weights();
    // A later attempt succeeds.
    test.server.set_change(|_, reply| reply);
    assert_model(&locate(&test.hub(), "a/b").unwrap().path, 1);
}

#[rstest]
#[case::other_etag("etag", Some("\"other\""), "GET", "etag other, must be")]
#[case::no_etag("etag", None, "HEAD", "the server sends no ETag")]
#[case::path("etag", Some("\"../../x\""), "HEAD", "must be a hash")]
#[case::commit(
    "x-repo-commit",
    Some("0123"),
    "HEAD",
    "the server sent commit 0123, must be"
)]
fn headers_that_contradict_the_commit_are_refused(
    #[case] header: &'static str,
    #[case] value: Option<&'static str>,
    #[case] method: &'static str,
    #[case] words: &str,
) {
    let test = Test::new();
    test.server.set_change(move |request, reply| {
        if request.method != method || !request.path().ends_with("config.json") {
            return reply;
        }
        match value {
            Some(value) => reply.with_header(header, value),
            None => reply.without_header(header),
        }
    });
    let error = format!("{:#}", error(&test.hub(), "a/b"));
    assert!(error.contains(words), "{error}");
    test.assert_without_weights();
}

#[rstest]
#[case::not_json("<html>", "does not describe a repository")]
#[case::no_commit(r#"{"sha": "main", "siblings": []}"#, "has no commit")]
fn a_server_that_is_no_hub_is_named(#[case] body: &'static str, #[case] words: &str) {
    let test = Test::new();
    test.server.set_change(move |_, _| Reply::new(200, body));
    let error = error(&test.hub(), "a/b").to_string();
    assert!(
        error.contains(words) && error.contains("HF_ENDPOINT"),
        "{error}"
    );
}

#[test]
fn offline_without_a_cache_the_error_says_what_to_do() {
    let test = Test::new();
    let error = error(&test.offline(), "a/b@v1").to_string();
    let cache = test.offline().cache;
    assert_eq!(
        error,
        format!(
            "a/b@v1: there is no such file or directory, and HF_HUB_OFFLINE forbids downloads. The cache {}: v1 is missing. Unset the variable, or run `hf download a/b --revision v1` where there is a network, with the same HF_HOME",
            cache.display()
        )
    );
    assert_eq!(test.server.downloads(), 0);
}

#[test]
fn offline_a_missing_file_is_named() {
    let test = Test::new();
    let located = locate(&test.hub(), "a/b").unwrap();
    fs::remove_file(located.path.join(WEIGHTS)).unwrap();
    let error = error(&test.offline(), "a/b").to_string();
    assert!(error.contains(": has no model.safetensors"), "{error}");
    assert!(error.contains("`hf download a/b`"), "{error}");
}

/// The state after an interrupted download by the Python library, which lists the files first.
#[test]
fn offline_a_small_file_that_the_list_has_is_not_left_out_silently() {
    let test = Test::new();
    let located = locate(&test.hub(), "a/b").unwrap();
    let file = "generation_config.json";
    fs::remove_file(located.path.join(file)).unwrap();
    locate(&test.offline(), "a/b").unwrap();
    test.write_list(&located.commit);
    let error = error(&test.offline(), "a/b").to_string();
    assert!(error.contains(&format!("{file} is missing.")), "{error}");
}

#[test]
fn without_a_network_the_last_commit_of_the_cache_is_used() {
    let test = Test::new();
    let located = locate(&test.hub(), "a/b").unwrap();
    let port = ClosedPort::new();
    let hub = Hub {
        endpoint: port.url(),
        ..test.hub()
    };
    assert_eq!(locate(&hub, "a/b").unwrap(), located);
    let error = error(&hub, "a/c");
    assert!(error.is::<TransferError>());
    assert!(error.to_string().contains("HF_ENDPOINT"), "{error}");
    // A rejection is not a missing network.
    test.server
        .change_repository(0, |r| *r = r.clone().with_token("hf_secret", true));
    assert!(locate(&test.hub(), "a/b").is_err());
}

#[test]
fn a_blob_of_the_wrong_length_is_downloaded_again() {
    let test = Test::new();
    let located = locate(&test.hub(), "a/b").unwrap();
    let blob = located.path.join(WEIGHTS).canonicalize().unwrap();
    fs::remove_dir_all(&located.path).unwrap();
    fs::write(&blob, "cut").unwrap();
    assert_model(&locate(&test.hub(), "a/b").unwrap().path, 1);
}

#[test]
fn several_processes_may_download_the_same_files() {
    let test = Test::new();
    thread::scope(|scope| {
        let threads: Vec<_> = (0..8)
            .map(|_| scope.spawn(|| locate(&test.hub(), "a/b").unwrap()))
            .collect();
        let threads = threads.into_iter();
        let located: Vec<_> = threads.map(|thread| thread.join().unwrap()).collect();
        // All of them have ended.
        for located in located {
            assert_model(&located.path, 1);
        }
    });
    assert_eq!(test.parts(), 0);
}

#[derive(Default)]
struct Watch {
    begun: Mutex<Vec<(Phase, usize)>>,
    bytes: AtomicUsize,
    limit: Option<usize>,
    canceled: AtomicBool,
}

impl Progress for Watch {
    fn begin(&self, phase: Phase, units: usize) {
        self.begun.lock().unwrap().push((phase, units));
    }

    fn advance(&self, units: usize, tokens: usize) {
        assert_eq!(tokens, 0);
        let bytes = self.bytes.fetch_add(units, Ordering::SeqCst) + units;
        if self.limit.is_some_and(|limit| bytes >= limit) {
            self.canceled.store(true, Ordering::SeqCst);
        }
    }

    fn is_canceled(&self) -> bool {
        self.canceled.load(Ordering::SeqCst)
    }
}

#[test]
fn progress_counts_each_byte_once() {
    let test = Test::new();
    let mut requests = 0;
    // The file is sent again from the beginning.
    test.server.set_change(move |request, reply| {
        requests += usize::from(of_weights(request));
        if of_weights(request) && requests < 3 {
            Reply::new(200, bytes(1, 700_000)).cut()
        } else {
            reply
        }
    });
    let watch = Watch::default();
    test.hub()
        .locate(&name("a/b"), HubContent::Model, None, &watch)
        .unwrap();
    let small = b"{\"seed\": 1}".len() + 2 + 3000;
    let expected = [(Phase::Download, small), (Phase::Download, 700_000)];
    assert_eq!(*watch.begun.lock().unwrap(), expected);
    assert_eq!(watch.bytes.into_inner(), small + 700_000);
}

#[rstest]
#[case::before(0)]
#[case::in_the_middle(200_000)]
fn a_canceled_download_leaves_no_part(#[case] limit: usize) {
    let test = Test::new();
    let watch = Watch {
        limit: Some(limit),
        canceled: AtomicBool::new(limit == 0),
        ..Watch::default()
    };
    let error = test
        .hub()
        .locate(&name("a/b"), HubContent::Model, None, &watch)
        .unwrap_err();
    assert!(error.is::<Interrupted>(), "{error:?}");
    test.assert_without_weights();
    assert!(watch.bytes.into_inner() < 700_000);
    assert_model(&locate(&test.hub(), "a/b").unwrap().path, 1);
}

#[test]
fn a_pause_can_be_canceled() {
    let test = Test::new();
    let watch = Arc::new(Watch::default());
    let stop = Arc::clone(&watch);
    test.server.set_change(move |_, _| {
        stop.canceled.store(true, Ordering::SeqCst);
        Reply::new(503, "").with_header("retry-after", 3600)
    });
    let error = test
        .hub()
        .locate(&name("a/b"), HubContent::Model, None, &*watch)
        .unwrap_err();
    assert!(error.is::<Interrupted>(), "{error:?}");
}

#[test]
fn a_folder_that_is_not_writable_is_an_error_that_names_the_variable() {
    let test = Test::new();
    fs::write(test.folder.path().join("hub"), "a file").unwrap();
    let error = format!("{:#}", error(&test.hub(), "a/b"));
    let cache = test.hub().cache.display().to_string();
    assert!(
        error.contains("writing") && error.contains(&cache),
        "{error}"
    );
}

#[test]
fn a_file_without_a_size_is_bounded() {
    let test = Test::new();
    test.server.set_change(|request, reply| {
        if !request.target.contains("tokenizer.json") {
            return reply;
        }
        let reply = reply.without_header("X-Linked-Size");
        reply.without_header("Content-Length").chunked()
    });
    let bounded = Hub {
        unsized_limit: 2999,
        ..test.hub()
    };
    let error = error(&bounded, "a/b");
    assert!(error.is::<TransferError>(), "{error:#}");
    let words = "more than 2999 bytes for a file whose size it does not report";
    assert!(format!("{error:#}").contains(words), "{error:#}");
    let roomy = Hub {
        unsized_limit: 3000,
        ..bounded
    };
    assert_model(&locate(&roomy, "a/b").unwrap().path, 1);
}

#[test]
fn the_list_of_files_has_a_limit_of_time() {
    let test = Test::new();
    let hub = Hub {
        answer_limit: Duration::ZERO,
        ..test.hub()
    };
    let error = error(&hub, "a/b");
    assert!(error.is::<TransferError>(), "{error:#}");
    assert!(
        format!("{error:#}").ends_with("the file list takes more than 0 s"),
        "{error:#}"
    );
}

/// A server whose response never ends. It calls `after` after the first part.
fn endless_server(after: impl FnOnce() + Send + 'static) -> (String, thread::JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let serve = move || {
        let (mut client, _) = listener.accept().unwrap();
        let mut request = Vec::new();
        while !request.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            client.read_exact(&mut byte).unwrap();
            request.extend(byte);
        }
        client.write_all(b"HTTP/1.1 200 OK\r\n\r\n ").unwrap();
        after();
        // White space may precede JSON.
        while client.write_all(&[b' '; 1000]).is_ok() {}
    };
    (url, thread::spawn(serve))
}

#[test]
fn an_endless_list_of_files_ends_with_its_limit_of_time() {
    let (endpoint, server) = endless_server(|| {});
    let hub = Hub {
        endpoint,
        answer_limit: Duration::from_millis(1),
        ..Test::new().hub()
    };
    let error = format!("{:#}", error(&hub, "a/b"));
    assert!(
        error.ends_with("the file list takes more than 0.001 s"),
        "{error}"
    );
    server.join().unwrap();
}

#[test]
fn an_endless_list_of_files_can_be_canceled() {
    let watch = Arc::new(Watch::default());
    let cancel = Arc::clone(&watch);
    let (endpoint, server) = endless_server(move || cancel.canceled.store(true, Ordering::SeqCst));
    let hub = Hub {
        endpoint,
        ..Test::new().hub()
    };
    let located = hub.locate(&name("a/b"), HubContent::Model, None, &*watch);
    assert!(located.unwrap_err().is::<Interrupted>());
    server.join().unwrap();
}

#[test]
fn a_file_that_never_ends_is_refused_after_its_size() {
    let test = Test::new();
    let (url, server) = endless_server(|| {});
    test.server.set_change(move |request, reply| {
        if request.method == "GET" && (300..400).contains(&reply.status()) {
            reply.with_header("location", &url)
        } else {
            reply
        }
    });
    let error = error(&test.hub(), "a/b");
    assert!(error.is::<TransferError>(), "{error:#}");
    let text = format!("{error:#}");
    assert!(
        text.contains("at least ") && text.contains(" bytes, must be 700000"),
        "{text}"
    );
    // It ends because the client closes the connection.
    server.join().unwrap();
    test.assert_without_weights();
}
