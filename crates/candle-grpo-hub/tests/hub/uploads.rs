//! Uploads: new and existing repositories, interruptions, and server faults.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use candle_grpo_base::Interrupted;
use candle_grpo_base::progress::{NoProgress, Phase, Progress};
use candle_grpo_hub::{Hub, HubName, Transfer, TransferError, UploadOptions, Uploaded};
use candle_grpo_test_support::{FakeHub, HubRepository, Reply, Request};
use rstest::rstest;
use serde_json::{Value, json};

const TOKEN: &str = "hf_secret";
const WEIGHTS: &str = "model.safetensors";
const CARD: &str = "---\ntags: [grpo]\n---\n# Model\n";

fn weights(seed: u8) -> Vec<u8> {
    (0..100_000_usize)
        .map(|i| (i as u8).wrapping_mul(31) ^ seed ^ (i >> 8) as u8)
        .collect()
}

/// A hub, and a folder with a model card, a configuration and weights.
struct Test {
    server: FakeHub,
    folder: tempfile::TempDir,
}

impl Test {
    fn new() -> Self {
        Self::with(None)
    }

    fn with(repository: impl IntoIterator<Item = HubRepository>) -> Self {
        let test = Self {
            server: FakeHub::start(repository),
            folder: tempfile::tempdir().unwrap(),
        };
        test.write("README.md", CARD.as_bytes());
        test.write("config.json", b"{}");
        test.write(WEIGHTS, &weights(1));
        test
    }

    fn model(&self) -> PathBuf {
        self.folder.path().join("model")
    }

    fn write(&self, name: &str, bytes: &[u8]) {
        let path = self.model().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }

    fn hub(&self) -> Hub {
        Hub {
            cache: self.folder.path().join("hub"),
            endpoint: self.server.url(),
            token: Some(TOKEN.to_owned()),
            offline: None,
            first_pause: Duration::from_millis(1),
            answer_limit: Duration::MAX,
            unsized_limit: u64::MAX,
        }
    }

    fn upload(&self) -> anyhow::Result<Uploaded> {
        self.upload_with(&UploadOptions::default())
    }

    fn upload_with(&self, options: &UploadOptions) -> anyhow::Result<Uploaded> {
        let name = name("a/b");
        self.hub()
            .upload(&self.model(), &name, options, &NoProgress)
    }

    fn fails(&self) -> anyhow::Error {
        self.upload().unwrap_err()
    }

    /// The repository's files at `main`, except those of the hub.
    fn files(&self) -> BTreeMap<String, Vec<u8>> {
        let mut files = self
            .server
            .change_repository(0, |r| r.files("main").clone());
        files.remove(".gitattributes");
        files
    }

    fn commits(&self) -> usize {
        self.server.change_repository(0, |r| r.commits())
    }

    /// The paths of the PUT requests.
    fn puts(&self) -> Vec<String> {
        let requests = self.server.storage.requests();
        assert!(requests.iter().all(|request| request.method == "PUT"));
        requests.into_iter().map(|request| request.target).collect()
    }

    /// The requests to the API whose path ends in `end`.
    fn posts(&self, end: &str) -> Vec<Request> {
        let requests = self.server.api.requests().into_iter();
        let is_meant =
            |request: &Request| request.method == "POST" && request.path().ends_with(end);
        requests.filter(is_meant).collect()
    }
}

fn name(text: &str) -> HubName {
    let prefixed = format!("hf://{text}");
    HubName::of_prefixed(Path::new(&prefixed)).unwrap().unwrap()
}

fn transfers(uploaded: &Uploaded) -> Vec<(&str, Transfer)> {
    let files = uploaded.files.iter();
    files
        .map(|file| (file.path.as_str(), file.transfer))
        .collect()
}

/// The JSON values in a body, one a line.
fn lines(request: &Request) -> Vec<Value> {
    let text = std::str::from_utf8(&request.body).unwrap();
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

fn is_put(request: &Request) -> bool {
    request.method == "PUT"
}

#[test]
fn a_new_repository_is_private_and_has_the_files_of_the_folder() {
    let test = Test::new();
    let uploaded = test.upload().unwrap();
    assert_eq!(uploaded.url, format!("{}/a/b", test.server.url()));
    assert!(uploaded.is_private && test.server.change_repository(0, |r| r.is_private()));
    assert_eq!(
        uploaded.commit,
        test.server.change_repository(0, |r| r.commit().to_owned())
    );
    let sent = [
        ("README.md", Transfer::Sent),
        ("config.json", Transfer::Sent),
        (WEIGHTS, Transfer::Sent),
    ];
    assert_eq!(transfers(&uploaded), sent);
    assert_eq!(uploaded.files[2].bytes, 100_000);
    let expected = BTreeMap::from([
        ("README.md".to_owned(), CARD.as_bytes().to_vec()),
        ("config.json".to_owned(), b"{}".to_vec()),
        (WEIGHTS.to_owned(), weights(1)),
    ]);
    assert!(test.files() == expected);

    let create = lines(&test.posts("/api/repos/create")[0]);
    let expected = json!({"type": "model", "name": "b", "organization": "a", "private": true});
    assert_eq!(create, [expected]);
    let batch = &test.posts("/a/b.git/info/lfs/objects/batch")[0];
    assert_eq!(batch.header("accept"), Some("application/vnd.git-lfs+json"));
    let sent = lines(&test.posts("/commit/main")[0]);
    assert_eq!(
        sent[0]["value"]["summary"],
        UploadOptions::default().message
    );
    // The base64 of "{}".
    let file = json!({"content": "e30=", "path": "config.json", "encoding": "base64"});
    assert_eq!(sent[2], json!({"key": "file", "value": file}));
    assert_eq!(sent[3]["key"], "lfsFile");
    assert_eq!(sent[3]["value"]["size"], 100_000);
}

#[test]
fn contents_that_the_branch_has_are_neither_sent_nor_committed_again() {
    let test = Test::new();
    let first = test.upload().unwrap();
    let again = test.upload().unwrap();
    assert_eq!(again.commit, first.commit);
    assert!(
        again
            .files
            .iter()
            .all(|file| file.transfer == Transfer::Present)
    );
    assert_eq!((test.commits(), test.puts().len()), (2, 1));

    test.write("config.json", b"{\"changed\": 1}");
    let changed = test.upload().unwrap();
    assert_ne!(changed.commit, first.commit);
    let present = Transfer::Present;
    let expected = [
        ("README.md", present),
        ("config.json", Transfer::Sent),
        (WEIGHTS, present),
    ];
    assert_eq!(transfers(&changed), expected);
    assert_eq!(test.files()["config.json"], b"{\"changed\": 1}");
    // The header and one file.
    assert_eq!(lines(&test.posts("/commit/main")[1]).len(), 2);
}

#[test]
fn an_existing_repository_keeps_its_other_files() {
    let other = [
        ("LICENSE", b"MIT".to_vec()),
        ("config.json", b"old".to_vec()),
    ];
    let test = Test::with([HubRepository::new("a/b", other)]);
    test.upload().unwrap();
    let files = test.files();
    assert_eq!(files["LICENSE"], b"MIT");
    assert_eq!(files["config.json"], b"{}");
    assert_eq!(files.len(), 4);
}

#[test]
fn everyone_can_read_only_what_is_meant_for_everyone() {
    let public = UploadOptions {
        public: true,
        ..UploadOptions::default()
    };
    let test = Test::new();
    assert!(!test.upload_with(&public).unwrap().is_private);
    assert!(!test.server.change_repository(0, |r| r.is_private()));

    let test = Test::with([HubRepository::new("a/b", None).as_public()]);
    let error = test.fails().to_string();
    assert!(
        error.contains("a/b: is public") && error.contains("--public"),
        "{error}"
    );
    assert_eq!(test.commits(), 1);
    assert!(!test.upload_with(&public).unwrap().is_private);
    assert!(test.files()[WEIGHTS] == weights(1));

    // A repository that exists stays private.
    let test = Test::with([HubRepository::new("a/b", None)]);
    assert!(test.upload_with(&public).unwrap().is_private);
}

#[test]
fn a_branch_is_created_from_main() {
    let test = Test::with([HubRepository::new("a/b", [("LICENSE", b"MIT".to_vec())])]);
    let options = UploadOptions {
        revision: Some("runs/best".to_owned()),
        ..UploadOptions::default()
    };
    let uploaded = test.upload_with(&options).unwrap();
    assert_eq!(
        uploaded.url,
        format!("{}/a/b/tree/runs%2Fbest", test.server.url())
    );
    let (branch, main) = test.server.change_repository(0, |r| {
        (r.files("runs/best").clone(), r.files("main").clone())
    });
    assert_eq!((branch.len(), main.len()), (4, 1));
    assert_eq!(branch["LICENSE"], b"MIT");
    let batch = lines(&test.posts("/batch")[0]);
    assert_eq!(batch[0]["ref"], json!({"name": "runs/best"}));
    // The branch exists now.
    assert_eq!(test.upload_with(&options).unwrap().commit, uploaded.commit);
}

#[test]
fn a_token_for_one_repository_need_not_create_it() {
    let test = Test::with([HubRepository::new("a/b", None)]);
    test.server.set_refusal(|request| {
        request
            .path()
            .ends_with("/create")
            .then(|| Reply::new(403, ""))
    });
    test.upload().unwrap();
    assert!(test.files()[WEIGHTS] == weights(1));
}

#[test]
fn paths_may_have_any_letters_and_folders() {
    let test = Test::new();
    test.write("größe/模型 1.json", b"1");
    test.write("größe/模型.safetensors", &weights(2));
    test.upload().unwrap();
    let files = test.files();
    assert_eq!(files["größe/模型 1.json"], b"1");
    assert!(files["größe/模型.safetensors"] == weights(2));
}

#[test]
fn an_empty_file_is_in_the_commit_and_an_ignored_one_is_not() {
    let test = Test::new();
    test.write("empty.safetensors", b"");
    test.write("train.log", b"1");
    let uploaded = test.upload().unwrap();
    assert_eq!(test.files()["empty.safetensors"], b"");
    assert!(!test.files().contains_key("train.log"));
    assert!(transfers(&uploaded).contains(&("train.log", Transfer::Ignored)));
    assert_eq!(test.puts().len(), 1);
}

#[test]
fn an_interrupted_upload_continues_with_the_file_that_was_interrupted() {
    let test = Test::new();
    test.write("model-2.safetensors", &weights(2));
    // Files are sent in the order of their names.
    let mut puts = 0;
    test.server.set_refusal(move |request| {
        puts += usize::from(is_put(request));
        (puts == 2).then(|| Reply::new(403, "<Error>expired</Error>"))
    });
    let error = format!("{:#}", test.fails());
    for words in [
        "a/b: model.safetensors",
        "status 403",
        "run the same command again",
    ] {
        assert!(error.contains(words), "{words:?} in {error}");
    }
    assert!(!error.contains("signature"), "{error}");
    assert_eq!(test.commits(), 1);

    test.server.set_refusal(|_| None);
    let uploaded = test.upload().unwrap();
    // The refused file alone is sent again.
    let puts = test.puts();
    assert!(puts.len() == 3 && puts[1] == puts[2], "{puts:?}");
    assert_eq!(uploaded.files[2].transfer, Transfer::Present);
    assert!(test.files()[WEIGHTS] == weights(1));
    assert!(test.files()["model-2.safetensors"] == weights(2));
}

#[test]
fn files_that_were_sent_before_a_failed_commit_are_not_sent_again() {
    let test = Test::new();
    test.server.set_refusal(|request| {
        request
            .path()
            .contains("/commit/")
            .then(|| Reply::new(412, ""))
    });
    let error = test.fails().to_string();
    assert!(
        error.contains("a/b: the commit: another change of the repository came first"),
        "{error}"
    );
    test.server.set_refusal(|_| None);
    test.upload().unwrap();
    assert_eq!(test.puts().len(), 1);
    assert!(test.files()[WEIGHTS] == weights(1));
}

#[test]
fn a_file_in_parts_repeats_only_the_part_that_failed() {
    let test = Test::new();
    test.server.set_part_size(40_000);
    let mut failed = false;
    test.server.set_refusal(move |request| {
        let is_second = is_put(request) && request.query("part") == Some("2");
        (is_second && !std::mem::replace(&mut failed, true)).then(|| Reply::new(500, ""))
    });
    test.upload().unwrap();
    assert!(test.files()[WEIGHTS] == weights(1));
    let requests = test.server.storage.requests();
    let parts: Vec<_> = requests
        .iter()
        .map(|request| (request.query("part").unwrap(), request.body.len()))
        .collect();
    // The server reads the whole body of the refused request.
    assert_eq!(
        parts,
        [("1", 40_000), ("2", 40_000), ("2", 40_000), ("3", 20_000)]
    );
    let completion = &lines(&test.posts("/complete")[0])[0];
    assert_eq!(completion["parts"][2]["partNumber"], 3);
    assert_eq!(test.posts("/verify").len(), 1);
}

#[rstest]
#[case::zero(json!("0"), "chunk_size: \"0\", must be a number of bytes")]
#[case::text(json!("many"), "chunk_size: \"many\", must be a number of bytes")]
#[case::few(json!(10_000), "URLs for 3 parts, must be 10 parts of 10000 bytes")]
fn parts_that_do_not_make_the_file_are_refused(#[case] size: Value, #[case] words: &str) {
    let test = Test::new();
    test.server.set_part_size(40_000);
    test.server.set_change(move |request, reply| {
        if !request.path().ends_with("/batch") {
            return reply;
        }
        let mut answer: Value = serde_json::from_slice(reply.body()).unwrap();
        answer["objects"][0]["actions"]["upload"]["header"]["chunk_size"] = size.clone();
        Reply::new(200, answer.to_string())
    });
    let error = format!("{:#}", test.fails());
    assert!(error.contains(words), "{error}");
    assert!(test.puts().is_empty());
}

#[rstest]
#[case("/create", 401, "creating the repository: the token in HF_TOKEN")]
#[case("/create", 401, "is not valid; create one that may write at http")]
#[case("/create", 403, "may not write there")]
#[case("/preupload/main", 403, "preparing the upload: the token")]
#[case(
    "/preupload/main",
    404,
    "has no such repository, account or organization"
)]
#[case(
    "/commit/main",
    409,
    "the commit: another change of the repository came first"
)]
#[case("/commit/main", 413, "larger than the hub accepts")]
#[case(
    "/commit/main",
    418,
    "the hub rejects it (status 418: short and stout)"
)]
#[case("/batch", 403, "model.safetensors: the token")]
fn a_refusal_names_the_repository_and_says_what_to_do(
    #[case] end: &'static str,
    #[case] status: u16,
    #[case] words: &str,
) {
    let test = Test::new();
    test.server.set_refusal(move |request| {
        let is_meant = request.path().ends_with(end);
        is_meant.then(|| Reply::new(status, r#"{"error": "short and stout"}"#))
    });
    let error = test.fails();
    assert!(!error.is::<TransferError>());
    let error = error.to_string();
    assert!(
        error.starts_with("a/b: ") && error.contains(words),
        "{error}"
    );
    assert!(error.contains(&format!("status {status}")), "{error}");
    let count = test
        .server
        .api
        .requests()
        .iter()
        .filter(|r| r.path().ends_with(end))
        .count();
    assert_eq!(count, 1);
}

#[test]
fn an_error_of_one_object_is_that_of_its_file() {
    let test = Test::new();
    test.server.set_change(|request, reply| {
        if !request.path().ends_with("/batch") {
            return reply;
        }
        let error = json!({"code": 422, "message": "storage quota exceeded"});
        Reply::new(200, json!({"objects": [{"error": error}]}).to_string())
    });
    let error = test.fails().to_string();
    assert!(
        error.contains("a/b: model.safetensors: ") && error.contains("storage quota exceeded"),
        "{error}"
    );
}

#[test]
fn wrong_metadata_are_found_before_anything_is_created() {
    let test = Test::new();
    test.server.set_refusal(|request| {
        let errors = json!({"errors": [{"message": "\"tags\" must be an array"}]});
        let is_check = request.path().ends_with("/validate-yaml");
        is_check.then(|| Reply::new(400, errors.to_string()))
    });
    let error = test.fails().to_string();
    assert_eq!(
        error,
        "a/b: the metadata in README.md are not valid: \"tags\" must be an array"
    );
    assert_eq!(test.server.api.requests().len(), 1);
    // A mirror may not check them.
    test.server.set_refusal(|request| {
        request
            .path()
            .ends_with("/validate-yaml")
            .then(|| Reply::new(404, ""))
    });
    test.upload().unwrap();
}

#[test]
fn busy_and_failing_servers_are_asked_again() {
    let test = Test::new();
    test.server.set_part_size(60_000);
    let mut counts = BTreeMap::<String, usize>::new();
    test.server.set_refusal(move |request| {
        let count = counts
            .entry(format!("{} {}", request.method, request.target))
            .or_default();
        *count += 1;
        match *count {
            1 => Some(Reply::new(429, "").with_header("retry-after", 0)),
            2 => Some(Reply::new(500, "")),
            3 => Some(Reply::new(503, "")),
            4 => Some(Reply::closed()),
            _ => None,
        }
    });
    test.upload().unwrap();
    assert!(test.files()[WEIGHTS] == weights(1));
    assert_eq!(test.puts().len(), 10);
}

#[rstest]
#[case::hub("/preupload/main", "preparing the upload")]
#[case::storage("signature=1", "model.safetensors")]
fn a_server_that_keeps_failing_is_given_up(#[case] end: &'static str, #[case] what: &str) {
    let test = Test::new();
    test.server.set_refusal(move |request| {
        let is_meant = request.target.ends_with(end);
        is_meant.then(|| Reply::new(429, "").with_header("retry-after", 0))
    });
    let error = test.fails();
    assert!(error.is::<TransferError>(), "{error:#}");
    let (error, prefix) = (error.to_string(), format!("a/b: {what}: "));
    for words in [
        prefix.as_str(),
        "too many requests (status 429); it asks for a pause of 0 s",
        "Run the same command again",
    ] {
        assert!(error.contains(words), "{words:?} in {error}");
    }
    assert!(!error.contains("signature"), "{error}");
    let requests = [test.server.api.requests(), test.server.storage.requests()].concat();
    assert_eq!(
        requests
            .iter()
            .filter(|request| request.target.ends_with(end))
            .count(),
        5
    );
}

#[rstest]
#[case::hub(false)]
#[case::storage(true)]
fn an_answer_that_does_not_come_is_given_up(#[case] of_storage: bool) {
    let test = Test::new();
    test.server.set_change(move |request, reply| {
        if is_put(request) == of_storage {
            reply.held()
        } else {
            reply
        }
    });
    let hub = Hub {
        answer_limit: Duration::from_millis(100),
        ..test.hub()
    };
    let options = UploadOptions::default();
    let uploaded = hub.upload(&test.model(), &name("a/b"), &options, &NoProgress);
    let error = uploaded.unwrap_err();
    assert!(error.is::<TransferError>(), "{error:#}");
    assert!(format!("{error:#}").contains(" 0.1 s"), "{error:#}");
}

#[test]
fn an_answer_that_never_ends_is_given_up() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let server = thread::spawn(move || {
        let (mut client, _) = listener.accept().unwrap();
        let mut request = [0; 1000];
        let _ = client.read(&mut request).unwrap();
        // The client may be gone already.
        let _ = client.write_all(b"HTTP/1.1 200 OK\r\n\r\n ");
        while client.write_all(&[b' '; 1000]).is_ok() {}
    });
    let test = Test::new();
    let hub = Hub {
        endpoint,
        answer_limit: Duration::from_millis(1),
        ..test.hub()
    };
    let options = UploadOptions::default();
    let uploaded = hub.upload(&test.model(), &name("a/b"), &options, &NoProgress);
    let error = format!("{:#}", uploaded.unwrap_err());
    assert!(
        error.contains(" 0.001 s") || error.contains("Connection"),
        "{error}"
    );
    server.join().unwrap();
}

#[test]
fn a_server_that_is_no_hub_is_named() {
    let test = Test::new();
    test.server.set_change(|_, _| Reply::new(200, "<html>"));
    let error = format!("{:#}", test.fails());
    assert!(error.contains("HF_ENDPOINT must be a hub's URL"), "{error}");
}

#[test]
fn the_token_goes_to_the_hub_alone_and_into_no_message() {
    for part_size in [None, Some(40_000)] {
        let test = Test::new();
        if let Some(bytes) = part_size {
            test.server.set_part_size(bytes);
        }
        test.upload().unwrap();
        let with_token = |requests: Vec<Request>| {
            let has_token = |request: &&Request| format!("{request:?}").contains(TOKEN);
            (requests.iter().filter(has_token).count(), requests.len())
        };
        let (api, of_api) = with_token(test.server.api.requests());
        assert_eq!(api, of_api);
        let (storage, of_storage) = with_token(test.server.storage.requests());
        assert_eq!((storage, of_storage > 0), (0, true));
    }
    let test = Test::new();
    test.server.set_refusal(|request| {
        let sent = request.header("authorization").unwrap_or_default();
        Some(Reply::new(
            403,
            json!({"error": format!("not for {sent}")}).to_string(),
        ))
    });
    let error = format!("{:?}", test.fails());
    assert!(
        error.contains("not for Bearer ***") && !error.contains(TOKEN),
        "{error}"
    );
}

#[test]
fn redirects_are_followed_within_the_hub_alone() {
    let test = Test::with([HubRepository::new("a/new", None)]);
    test.server.set_refusal(|request| {
        let target = request.target.replace("/a/b", "/a/new");
        let is_old = target != request.target;
        is_old.then(|| Reply::new(307, "").with_header("location", target))
    });
    test.server
        .set_change(|request, reply| match request.path() {
            "/api/repos/create" => Reply::new(409, ""),
            _ => reply,
        });
    test.upload().unwrap();
    assert!(test.files()[WEIGHTS] == weights(1));

    let storage = test.server.storage.url();
    test.server.set_refusal(move |request| {
        let is_commit = request.path().contains("/preupload/");
        is_commit.then(|| Reply::new(307, "").with_header("location", &storage))
    });
    let error = format!("{:#}", test.fails());
    assert!(error.contains("another host, is not followed"), "{error}");
}

#[rstest]
#[case::no_folder("absent", "absent: must be a directory")]
#[case::a_file("model/config.json", "config.json: must be a directory")]
#[case::empty("empty", "empty: has no files")]
fn a_folder_without_files_is_refused_without_a_request(#[case] path: &str, #[case] words: &str) {
    let test = Test::new();
    fs::create_dir(test.folder.path().join("empty")).unwrap();
    let folder = test.folder.path().join(path);
    let options = UploadOptions::default();
    let uploaded = test
        .hub()
        .upload(&folder, &name("a/b"), &options, &NoProgress);
    let error = uploaded.unwrap_err().to_string();
    assert!(error.contains(words), "{error}");
    assert!(test.server.api.requests().is_empty());
}

#[rstest]
#[case::data_set("datasets/a/b", None, "datasets/a/b: must be ORG/NAME")]
#[case::revision("a/b@main", None, "a/b@main: must be ORG/NAME")]
#[case::branch(
    "a/b",
    Some("x..y"),
    "revision: \"x..y\", must be the name of a branch"
)]
fn a_wrong_name_is_refused(
    #[case] text: &str,
    #[case] revision: Option<&str>,
    #[case] words: &str,
) {
    let test = Test::new();
    let options = UploadOptions {
        revision: revision.map(str::to_owned),
        ..UploadOptions::default()
    };
    let error = test
        .hub()
        .check_upload(&name(text), &options)
        .unwrap_err()
        .to_string();
    assert!(error.contains(words), "{error}");
}

#[test]
fn without_a_network_or_token_there_is_no_upload() {
    let test = Test::new();
    let error = |hub: Hub| {
        let options = UploadOptions::default();
        let uploaded = hub.upload(&test.model(), &name("a/b"), &options, &NoProgress);
        uploaded.unwrap_err().to_string()
    };
    let offline = error(Hub {
        offline: Some("HF_HUB_OFFLINE"),
        ..test.hub()
    });
    assert_eq!(
        offline,
        "a/b: HF_HUB_OFFLINE forbids uploads; unset the variable"
    );
    let anonymous = error(Hub {
        token: None,
        ..test.hub()
    });
    assert!(
        anonymous.contains("set HF_TOKEN, or log in with `hf auth login`"),
        "{anonymous}"
    );
    assert!(test.server.api.requests().is_empty());
}

/// Counts bytes, and cancels after `limit` of them.
#[derive(Default)]
struct Watch {
    limit: Option<usize>,
    total: AtomicUsize,
    bytes: AtomicUsize,
}

impl Progress for Watch {
    fn begin(&self, phase: Phase, units: usize) {
        assert_eq!(phase, Phase::Upload);
        self.total.fetch_add(units, Ordering::SeqCst);
    }

    fn advance(&self, units: usize, _: usize) {
        self.bytes.fetch_add(units, Ordering::SeqCst);
    }

    fn is_canceled(&self) -> bool {
        let bytes = self.bytes.load(Ordering::SeqCst);
        self.limit.is_some_and(|limit| bytes >= limit)
    }
}

#[test]
fn progress_counts_each_byte_once() {
    let test = Test::new();
    test.server.set_part_size(60_000);
    let mut puts = 0;
    test.server.set_refusal(move |request| {
        puts += usize::from(is_put(request));
        (puts == 1).then(|| Reply::new(500, ""))
    });
    let size = CARD.len() + 2 + 100_000;
    for _ in 0..2 {
        let watch = Watch::default();
        let options = UploadOptions::default();
        let uploaded = test
            .hub()
            .upload(&test.model(), &name("a/b"), &options, &watch);
        uploaded.unwrap();
        assert_eq!(
            (watch.total.into_inner(), watch.bytes.into_inner()),
            (size, size)
        );
    }
}

#[rstest]
#[case::before(0)]
#[case::in_a_large_file(10_000)]
fn a_canceled_upload_commits_nothing_and_can_be_repeated(#[case] limit: usize) {
    let test = Test::new();
    // More than is read at once.
    let large = weights(1).repeat(20);
    fs::write(test.model().join(WEIGHTS), &large).unwrap();
    let watch = Watch {
        limit: Some(limit),
        ..Watch::default()
    };
    let options = UploadOptions::default();
    let uploaded = test
        .hub()
        .upload(&test.model(), &name("a/b"), &options, &watch);
    let error = uploaded.unwrap_err();
    assert!(error.is::<Interrupted>(), "{error:?}");
    assert!(test.posts("/commit/main").is_empty());
    // The rest of the file is not read.
    assert!(watch.bytes.into_inner() < large.len());
    test.upload().unwrap();
    assert!(test.files()[WEIGHTS] == large);
}
