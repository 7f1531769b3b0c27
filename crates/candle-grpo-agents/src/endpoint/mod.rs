//! The HTTP server.

mod reply;
mod route;

use std::collections::{HashMap, VecDeque};
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::runtime;
use tokio::sync::{Notify, Semaphore, oneshot};
use tokio::task::AbortHandle;

use crate::episode::Episode;
use crate::key::Key;

/// Maximum number of connections; further ones wait.
const MAX_CONNECTIONS: usize = 1024;

/// Time limit for a request's head, and for an idle connection.
const HEAD_LIMIT: Duration = Duration::from_secs(60);

/// Time limit for a request's body.
const BODY_LIMIT: Duration = Duration::from_secs(60);

/// Maximum head size in bytes.
const MAX_HEAD: usize = 64 << 10;

/// Delay before the server accepts again after the system refuses.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The open episodes.
#[derive(Debug)]
pub(crate) struct Episodes {
    by_id: Mutex<HashMap<String, Arc<Episode>>>,
    /// Episodes that wait for an agent which starts by itself.
    offered: Mutex<VecDeque<Arc<Episode>>>,
    offer: Notify,
    /// Keys with which agents request episodes, one per worker; empty: none are offered.
    keys: Vec<Key>,
    max_request_bytes: usize,
    /// Number of connections that are free.
    connections: Arc<Semaphore>,
    address: SocketAddr,
}

impl Episodes {
    /// Opens an episode. If `offers`, the next agent that asks gets it.
    pub(crate) fn open(&self, episode: &Arc<Episode>, offers: bool) {
        let mut by_id = self.by_id.lock().unwrap_or_else(PoisonError::into_inner);
        by_id.insert(episode.id.clone(), Arc::clone(episode));
        drop(by_id);
        if offers {
            let mut offered = self.offered.lock().unwrap_or_else(PoisonError::into_inner);
            offered.push_back(Arc::clone(episode));
            drop(offered);
            self.offer.notify_one();
        }
    }

    /// Removes an episode.
    pub(crate) fn remove(&self, id: &str) {
        let mut by_id = self.by_id.lock().unwrap_or_else(PoisonError::into_inner);
        by_id.remove(id);
        drop(by_id);
        let mut offered = self.offered.lock().unwrap_or_else(PoisonError::into_inner);
        offered.retain(|episode| episode.id != id);
    }

    fn get(&self, id: &str) -> Option<Arc<Episode>> {
        let by_id = self.by_id.lock().unwrap_or_else(PoisonError::into_inner);
        by_id.get(id).cloned()
    }

    fn take_offer(&self) -> Option<Arc<Episode>> {
        let mut offered = self.offered.lock().unwrap_or_else(PoisonError::into_inner);
        let episode = offered.pop_front();
        if !offered.is_empty() {
            self.offer.notify_one();
        }
        episode
    }

    /// Waits for an episode to offer to an agent.
    async fn next_offer(&self) -> Arc<Episode> {
        loop {
            match self.take_offer() {
                Some(episode) => return episode,
                None => self.offer.notified().await,
            }
        }
    }

    /// Episode URL for agents on this machine.
    pub(crate) fn url(&self, episode: &Episode) -> String {
        format!("{}/s/{}", self.origin(), episode.id)
    }

    /// Server URL for agents on this machine.
    fn origin(&self) -> String {
        format!("http://{}", self.local_address())
    }

    /// Server address for agents on this machine.
    fn local_address(&self) -> SocketAddr {
        let mut address = self.address;
        if address.ip().is_unspecified() {
            match address {
                SocketAddr::V4(_) => address.set_ip([127, 0, 0, 1].into()),
                SocketAddr::V6(_) => address.set_ip(std::net::Ipv6Addr::LOCALHOST.into()),
            }
        }
        address
    }
}

/// Opens the server to agents on this machine.
#[derive(Debug, Clone)]
pub(crate) struct Entrances {
    episodes: Arc<Episodes>,
    runtime: runtime::Handle,
}

/// One more listener of the server. It closes when dropped.
pub(crate) struct Entrance(AbortHandle);

impl Entrances {
    /// Server URL for agents on this machine.
    pub(crate) fn origin(&self) -> String {
        self.episodes.origin()
    }

    /// Server address for agents on this machine.
    pub(crate) fn address(&self) -> SocketAddr {
        self.episodes.local_address()
    }

    /// Serves the connections of `listener`, too.
    pub(crate) fn open(&self, listener: TcpListener) -> Result<Entrance> {
        listener.set_nonblocking(true)?;
        let serving = serve(listener, Arc::clone(&self.episodes));
        Ok(Entrance(self.runtime.spawn(serving).abort_handle()))
    }
}

impl Drop for Entrance {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The server, on its own thread. It stops when dropped.
pub(crate) struct Endpoint {
    entrances: Entrances,
    /// The listener at the address of the server.
    _main: Entrance,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Endpoint {
    /// Starts the server.
    pub(crate) fn start(
        listen: SocketAddr,
        keys: Vec<Key>,
        max_request_bytes: usize,
    ) -> Result<Self> {
        let must = || format!("listen: {listen}, must be a free address of this machine");
        let listener = TcpListener::bind(listen).with_context(must)?;
        let episodes = Arc::new(Episodes {
            by_id: Mutex::default(),
            offered: Mutex::default(),
            offer: Notify::new(),
            keys,
            max_request_bytes,
            connections: Arc::new(Semaphore::new(MAX_CONNECTIONS)),
            address: listener.local_addr()?,
        });
        let runtime = runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()
            .context("starting the server for agents")?;
        let entrances = Entrances {
            episodes,
            runtime: runtime.handle().clone(),
        };
        let main = entrances.open(listener)?;
        let (stop, stopped) = oneshot::channel::<()>();
        let thread = thread::Builder::new().name("agents".to_owned());
        let thread = thread.spawn(move || {
            // Dropping the server drops the sender, and dropping the runtime drops its connections.
            let _ = runtime.block_on(stopped);
        })?;
        Ok(Self {
            entrances,
            _main: main,
            stop: Some(stop),
            thread: Some(thread),
        })
    }

    pub(crate) fn episodes(&self) -> &Episodes {
        &self.entrances.episodes
    }

    pub(crate) fn entrances(&self) -> &Entrances {
        &self.entrances
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.entrances.episodes.address
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

async fn serve(listener: TcpListener, episodes: Arc<Episodes>) {
    let listener = match tokio::net::TcpListener::from_std(listener) {
        Ok(listener) => listener,
        Err(error) => {
            tracing::error!("the server for agents cannot listen: {error}");
            return;
        }
    };
    loop {
        let Ok(permit) = Arc::clone(&episodes.connections).acquire_owned().await else {
            return;
        };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!("the server for agents cannot accept a connection: {error}");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let _ = stream.set_nodelay(true);
        let episodes = Arc::clone(&episodes);
        tokio::spawn(async move {
            let service = service_fn(|request| {
                let episodes = Arc::clone(&episodes);
                async move { Ok::<_, std::convert::Infallible>(route::answer(&episodes, request).await) }
            });
            let served = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEAD_LIMIT)
                .max_buf_size(MAX_HEAD)
                .serve_connection(TokioIo::new(stream), service);
            if let Err(error) = served.await {
                tracing::debug!("a connection of an agent ended: {error}");
            }
            drop(permit);
        });
    }
}
