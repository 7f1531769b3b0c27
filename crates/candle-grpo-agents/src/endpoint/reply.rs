//! Reply bodies.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use candle_grpo_base::server;
use hyper::Response;
use hyper::body::{Body, Frame, SizeHint};
use hyper::header::CONTENT_TYPE;
use serde_json::Value;

use crate::episode::Episode;

/// A body that notifies its episode when it is sent.
pub(super) struct Reply {
    bytes: Option<Bytes>,
    /// Episode and position for the request that this body answers.
    receipt: Option<(Arc<Episode>, usize)>,
}

impl Body for Reply {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let bytes = self.bytes.take();
        if bytes.is_some()
            && let Some((episode, place)) = self.receipt.take()
        {
            episode.delivered(place);
        }
        Poll::Ready(bytes.map(|bytes| Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        self.bytes.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.bytes.as_ref().map_or(0, Bytes::len) as u64)
    }
}

const JSON: &str = "application/json";
const EVENTS: &str = "text/event-stream; charset=utf-8";

fn reply(
    status: u16,
    kind: &'static str,
    body: String,
    receipt: Option<(Arc<Episode>, usize)>,
) -> Response<Reply> {
    let body = Reply {
        bytes: Some(Bytes::from(body)),
        receipt,
    };
    server::response(status, kind, body)
}

/// JSON reply.
pub(super) fn json(status: u16, body: &Value) -> Response<Reply> {
    reply(status, JSON, body.to_string(), None)
}

/// Reply without a body.
pub(super) fn empty(status: u16) -> Response<Reply> {
    let mut response = reply(status, JSON, String::new(), None);
    response.headers_mut().remove(CONTENT_TYPE);
    response.body_mut().bytes = None;
    response
}

/// Answer to an episode's request at `place`.
pub(super) fn answer(
    body: String,
    streams: bool,
    episode: Arc<Episode>,
    place: usize,
) -> Response<Reply> {
    let kind = if streams { EVENTS } else { JSON };
    reply(200, kind, body, Some((episode, place)))
}
