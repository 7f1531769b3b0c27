//! The HTTP server.

mod reply;
mod route;

use std::collections::{HashMap, VecDeque};
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Result;
use candle_grpo_base::server::{self, Entrance, Key, Listener, Server};
use tokio::sync::Notify;

use crate::episode::Episode;

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
    server: server::Entrances,
}

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
        self.server.open(listener)
    }
}

/// The server with its episodes. It stops when dropped.
#[derive(Debug)]
pub(crate) struct Endpoint {
    entrances: Entrances,
    _server: Server,
}

impl Endpoint {
    /// Starts the server.
    pub(crate) fn start(
        listen: SocketAddr,
        keys: Vec<Key>,
        max_request_bytes: usize,
    ) -> Result<Self> {
        let listener = Listener::bind(listen)?;
        let episodes = Arc::new(Episodes {
            by_id: Mutex::default(),
            offered: Mutex::default(),
            offer: Notify::new(),
            keys,
            max_request_bytes,
            address: listener.address(),
        });
        let served = Arc::clone(&episodes);
        let server = listener.serve("agents", move |request| {
            let episodes = Arc::clone(&served);
            async move { route::answer(&episodes, request).await }
        })?;
        let entrances = Entrances {
            episodes,
            server: server.entrances().clone(),
        };
        Ok(Self {
            entrances,
            _server: server,
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
