//! The server.

use std::fmt;
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;

use anyhow::Result;
use candle_grpo_base::server::{Key, Listener, Server};
use candle_grpo_train::Pretrained;
use candle_grpo_train::rollout::AdapterEngine;

use crate::base::Base;
use crate::config::TinkerConfig;
use crate::engine::Engine;
use crate::queue::Queues;
use crate::route;
use crate::sampling::Sampler;
use crate::service::Service;
use crate::store::Store;

/// A server's address, key and folder, before its model is loaded.
pub struct TinkerListener {
    config: TinkerConfig,
    key: Option<Arc<Key>>,
    store: Store,
    listener: Listener,
    engine: Option<Arc<dyn AdapterEngine>>,
}

impl fmt::Debug for TinkerListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut fields = f.debug_struct("TinkerListener");
        let fields = fields.field("config", &self.config);
        fields
            .field("listener", &self.listener)
            .finish_non_exhaustive()
    }
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
            engine: None,
            config,
        })
    }

    /// Samples with `engine` instead of in this process. Training goes on meanwhile.
    #[must_use]
    pub fn with_engine(mut self, engine: Arc<dyn AdapterEngine>) -> Self {
        self.engine = Some(engine);
        self
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
            engine,
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
        let base = Arc::new(base);
        let sampler = Sampler::new(Arc::clone(&base), Arc::clone(&queues), engine, &config)?;
        let sampler = Arc::new(sampler);
        let engine = Engine::new(base, config, Arc::clone(&queues), Arc::clone(&sampler));
        let mut started = TinkerServer {
            threads: Vec::new(),
            queues,
            server: Some(server),
            address,
        };
        started.start_thread("tinker-engine", || engine.run())?;
        for _ in 0..sampler.num_threads() {
            let sampler = Arc::clone(&sampler);
            started.start_thread("tinker-sampler", move || {
                sampler.run();
                Ok(())
            })?;
        }
        Ok(started)
    }
}

/// A running server. When dropped, it finishes the training request that it works on, cancels
/// samples, and stops.
#[derive(Debug)]
pub struct TinkerServer {
    queues: Arc<Queues>,
    threads: Vec<thread::JoinHandle<()>>,
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

    /// Starts a thread that takes turns. Its failure is reported to clients.
    fn start_thread(
        &mut self,
        name: &str,
        work: impl FnOnce() -> Result<()> + Send + 'static,
    ) -> Result<()> {
        let queues = Arc::clone(&self.queues);
        let thread = thread::Builder::new().name(name.to_owned());
        self.threads
            .push(thread.spawn(move || watch(&queues, work))?);
        Ok(())
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
        for thread in self.threads.drain(..) {
            let _ = thread.join();
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
