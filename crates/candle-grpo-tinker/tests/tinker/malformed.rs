//! Bodies that are wrong.

use std::path::Path;

use candle_grpo_test_support::{is_long, words};
use serde_json::json;
use tempfile::tempdir;

use super::requests::{RECORDED, recorded};
use super::running::{Running, example, pass};

/// A body with one change: it is cut, a byte is another one, or a piece is repeated.
fn changed(body: &[u8], choice: &mut impl FnMut(usize) -> usize) -> Vec<u8> {
    let mut body = body.to_vec();
    match (choice(4), body.len()) {
        (_, 0) => body.push(choice(256) as u8),
        (0, length) => body.truncate(choice(length)),
        (1, length) => {
            let at = choice(length);
            body.splice(at..at, std::iter::repeat_n(b'9', choice(40)));
        }
        (_, length) => body[choice(length)] = choice(256) as u8,
    }
    body
}

#[test]
fn changed_bodies_are_answered_and_change_nothing() {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    // Another session has the same numbers before and after.
    let other = server.new_model();
    let of_other = |seq: u64| pass(&other, seq, "cross_entropy", &[example(&[1, 2, 3, 4])]);
    let before = server.call("forward", &of_other(1));
    let model = server.new_model();
    let mut words = words(1);
    let mut choice = |bound: usize| (words.next().unwrap_or(1) >> 11) as usize % bound.max(1);
    for round in 0..if is_long() { 100 } else { 20 } {
        for name in RECORDED {
            let (call, headers, body) = recorded(name, &model);
            let body = changed(&body, &mut choice);
            let headers: Vec<(&str, &str)> = headers
                .iter()
                .map(|(name, value)| (name.as_str(), value.as_str()))
                .collect();
            let reply = server.send(&call, &headers, &body);
            let json = reply.json();
            match reply.status {
                200 => {}
                400..500 => {
                    let detail = json["detail"].as_str();
                    assert!(detail.is_some_and(|detail| !detail.is_empty()), "{json}");
                }
                status => panic!("round {round}, {call}: {status} {json}"),
            }
        }
    }
    assert_eq!(server.call("forward", &of_other(2)), before);
}

#[test]
fn bodies_that_are_too_large_are_refused() {
    let folder = tempdir().unwrap();
    let config = candle_grpo_tinker::TinkerConfig {
        max_request_bytes: 1000,
        ..candle_grpo_tinker::TinkerConfig::new(folder.path() as &Path, "tiny")
    };
    let server = Running::with(config);
    let large = server.send("forward_backward", &[], &[b' '; 1001]);
    assert_eq!(large.status, 413);
    // Small as sent, and large when decompressed.
    let packed = zstd::bulk::compress(&[b' '; 100_000], 3).unwrap();
    assert!(packed.len() < 1000);
    let large = server.send("forward_backward", &[("content-encoding", "zstd")], &packed);
    assert_eq!(large.status, 400);
    assert!(
        large.detail().contains("--max-request-bytes"),
        "{}",
        large.detail()
    );
    let other = server.send("forward_backward", &[("content-encoding", "br")], b"{}");
    assert_eq!(
        other.detail(),
        "Content-Encoding: br, must be zstd or absent"
    );
}

#[test]
fn calls_that_do_not_exist_are_named() {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let missing = server.try_post("copy_weights", &json!({}));
    assert_eq!(missing.status, 404);
    let words = "copy_weights: this server does not have the call (docs/tinker.md)";
    assert_eq!(missing.detail(), words);
    assert_eq!(server.try_post("no_such_call", &json!({})).status, 404);
    assert_eq!(server.try_post("healthz", &json!({})).status, 405);
}
