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

/// A running server. When dropped, it finishes the request that it works on, and stops.
#[derive(Debug)]
pub struct TinkerServer {
    queues: Arc<Queues>,
    engine: Option<thread::JoinHandle<()>>,
    /// Absent while the server is dropped.
    server: Option<Server>,
    address: SocketAddr,
}

impl TinkerServer {
    /// Starts the server for a model, and continues what the folder promises.
    ///
    /// # Errors
    ///
    /// Fails if an option is invalid, the address is not free, the folder cannot be read or another
    /// server has it open.
    pub fn start(config: TinkerConfig, pretrained: Pretrained) -> Result<Self> {
        config.validate()?;
        let key = match &config.api_key_env {
            Some(variable) => Some(Arc::new(Key::from_variable(variable)?)),
            None => None,
        };
        let base = Base::new(config.model_name.clone(), pretrained, config.compute_dtype)?;
        // The engine's thread may have a stream of its own.
        base.parameters.device().synchronize()?;
        let store = Store::open(&config.folder)?;
        let queues = Arc::new(Queues::new(store, config.max_waiting)?);
        let listener = Listener::bind(config.listen)?;
        let address = listener.address();
        let bytes = config.max_request_bytes;
        let service = Arc::new(Service::new(base.info.clone(), Arc::clone(&queues), bytes));
        let server = listener.serve("tinker", move |request| {
            route::answer(Arc::clone(&service), key.clone(), request)
        })?;
        let engine = Engine::new(base, config, Arc::clone(&queues));
        let thread = thread::Builder::new().name("tinker-engine".to_owned());
        let watched = Arc::clone(&queues);
        Ok(Self {
            engine: Some(thread.spawn(move || watch(&watched, || engine.run()))?),
            queues,
            server: Some(server),
            address,
        })
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
