//! The server.

use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;

use anyhow::Result;
use candle_grpo_base::server::{Key, Listener, Server};
use candle_grpo_train::Pretrained;

use crate::base::Base;
use crate::config::TinkerConfig;
use crate::engine::Engine;
use crate::queue::Queues;
use crate::route;
use crate::service::Service;
use crate::store::Store;

/// A server's address, key and folder, before its model is loaded.
#[derive(Debug)]
pub struct TinkerListener {
    config: TinkerConfig,
    key: Option<Arc<Key>>,
    store: Store,
    listener: Listener,
}

impl TinkerListener {
    /// Reads the key, locks the folder and binds the address.
    ///
    /// # Errors
    ///
    /// Fails if an option is invalid, the address is not free, the folder cannot be read or another
    /// server has it open.
    pub fn bind(config: TinkerConfig) -> Result<Self> {
        config.validate()?;
        let variable = config.api_key_env.as_deref();
        let key = variable.map(Key::from_variable).transpose()?;
        Ok(Self {
            key: key.map(Arc::new),
            store: Store::open(&config.folder)?,
            listener: Listener::bind(config.listen)?,
            config,
        })
    }

    /// Starts the server for a model, and continues what the folder promises.
    ///
    /// # Errors
    ///
    /// Fails if the model cannot be frozen, or a session in the folder cannot be read.
    pub fn serve(self, pretrained: Pretrained) -> Result<TinkerServer> {
        let Self {
            config,
            key,
            store,
            listener,
        } = self;
        let base = Base::new(config.model_name.clone(), pretrained, config.compute_dtype)?;
        // The engine's thread may have a stream of its own.
        base.parameters.device().synchronize()?;
        let queues = Arc::new(Queues::new(store, config.max_waiting)?);
        let address = listener.address();
        let bytes = config.max_request_bytes;
        let service = Arc::new(Service::new(base.info.clone(), Arc::clone(&queues), bytes));
        let server = listener.serve("tinker", move |request| {
            route::answer(Arc::clone(&service), key.clone(), request)
        })?;
        let engine = Engine::new(base, config, Arc::clone(&queues));
        let thread = thread::Builder::new().name("tinker-engine".to_owned());
        let watched = Arc::clone(&queues);
        Ok(TinkerServer {
            engine: Some(thread.spawn(move || watch(&watched, || engine.run()))?),
            queues,
            server: Some(server),
            address,
        })
    }
}

/// A running server. When dropped, it finishes the training request that it works on, cancels
/// samples, and stops.
#[derive(Debug)]
pub struct TinkerServer {
    queues: Arc<Queues>,
    engine: Option<thread::JoinHandle<()>>,
    /// Absent while the server is dropped.
    server: Option<Server>,
    address: SocketAddr,
}

impl TinkerServer {
    /// [Binds](TinkerListener::bind) the address, and [starts](TinkerListener::serve) the server.
    ///
    /// # Errors
    ///
    /// As in both.
    pub fn start(config: TinkerConfig, pretrained: Pretrained) -> Result<Self> {
        TinkerListener::bind(config)?.serve(pretrained)
    }

    /// Returns the address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for TinkerServer {
    fn drop(&mut self) {
        self.server = None;
        self.queues.stop();
        if let Some(engine) = self.engine.take() {
            let _ = engine.join();
        }
    }
}

/// Works, and reports a failure to clients.
fn watch(queues: &Queues, work: impl FnOnce() -> Result<()>) {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(())) => {}
        Ok(Err(error)) => queues.fail(format!("{error:#}")),
        Err(_) => queues.fail("a panic, whose message is on standard error".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_of_the_engine_is_reported() {
        let folder = tempfile::tempdir().unwrap();
        let queues = Queues::new(Store::open(folder.path()).unwrap(), 1).unwrap();
        watch(&queues, || Ok(()));
        queues.ensure_working().unwrap();
        watch(&queues, || panic!("lost"));
        let refusal = queues.ensure_working().unwrap_err();
        assert_eq!(refusal.status, 503);
        assert!(refusal.message.contains("a panic"), "{}", refusal.message);
    }
}
