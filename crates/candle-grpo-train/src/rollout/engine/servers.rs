//! A generator's or teacher's servers: which are ready, and how others become so.

use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Result, bail, ensure};

use super::probe::Distribution;
use super::protocol::{Failure, Protocol, Server};
use super::sleep::Asleep;
use super::transfer::Transfer;
use super::vllm_ipc::Sharing;
use super::weight_check::WeightCheck;
use super::weights::{EngineWeights, WeightFormat};
use crate::Progress;
use crate::rollout::RolloutConfig;
use candle_core::Device;
use candle_grpo_base::clock::running_time;
use candle_grpo_base::workers::{POLL, Workers};
use candle_grpo_collective::{SharedMemory, TransferTransport};
use candle_grpo_core::validate::Name;
use candle_grpo_hub::http::{JsonClient, backoff, pause};

/// Wait before a server is asked again to end its requests.
const INTERRUPT_INTERVAL: Duration = Duration::from_millis(250);
/// Wait before a failed server is checked again; it doubles with each failure.
const FIRST_BACKOFF: Duration = Duration::from_millis(50);
const MAX_BACKOFF: Duration = Duration::from_secs(5);

/// One engine's servers.
///
/// A server that fails a request is set aside. A thread checks its health, and sends it the weights
/// again if it has lost them. After a probe with these weights, it is ready.
pub(super) struct Servers {
    pub(super) protocol: Box<dyn Protocol>,
    pub(super) list: Vec<Server>,
    /// The configuration section, for errors.
    pub(super) section: &'static str,
    served_model_name: Option<String>,
    server_timeout: Duration,
    /// The setting of the transfer, for errors.
    weight_sync: String,
    /// True if the servers sleep while the policy trains.
    pub(super) sleep_mode: bool,
    /// The policy's device, on which the servers that sleep have their memory.
    device: OnceLock<Device>,
    /// The comparison of their weights with the transferred ones.
    weight_check: Option<WeightCheck>,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    servers: Vec<ServerState>,
    /// The weights that every server must serve; absent: those that it already serves.
    weights: Option<Arc<EngineWeights>>,
    /// Counts weight changes.
    generation: u64,
    /// Start of a wait for any server to be ready.
    waiting_since: Option<Duration>,
    /// True if no server may start loading weights, because their directory may be removed.
    is_closed: bool,
    /// True if the servers sleep, and have no weights.
    is_asleep: bool,
}

struct ServerState {
    status: Status,
    in_flight: usize,
    /// Failures since it was last ready.
    failures: u32,
    last_failure: Option<String>,
    /// True if it must load the weights even if it reports their version.
    must_load: bool,
    /// True while it is loading weights.
    is_loading: bool,
    /// Number of times that it has started loading weights.
    loads: u64,
    /// True if a probe must compare its log-probs before it samples completions.
    must_probe: bool,
    /// Its log-probs' distribution, once a probe has determined it.
    distribution: Option<Distribution>,
    /// Failed requests since the last successful one.
    failed_requests: u32,
    /// The setting that it does not accept, with its failure.
    refusal: Option<String>,
}

/// With times from [`running_time`], so that no time runs out while this process is suspended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Status {
    Ready,
    /// Has been waiting for a probe since this time.
    Unprobed(Duration),
    /// Is checked again at this time.
    Down(Duration),
    /// A thread has been checking it since this time.
    Recovering(Duration),
}

/// A server that answers a request, until the value is dropped.
pub(super) struct Lease<'a> {
    servers: &'a Servers,
    index: usize,
    generation: u64,
    /// [`ServerState::loads`] at the start.
    loads: u64,
    /// The weights that it serves.
    pub(super) weights: Option<Arc<EngineWeights>>,
    /// Its log-probs' distribution, if known.
    pub(super) distribution: Option<Distribution>,
}

impl Servers {
    pub(super) fn new(
        config: &RolloutConfig,
        protocol: Box<dyn Protocol>,
        api_key: Option<String>,
        section: &'static str,
    ) -> Self {
        // An engine's servers are in the same network.
        let http = Arc::new(JsonClient::new(api_key, false));
        let servers = config.base_url.iter().map(|url| Server {
            url: url.trim_end_matches('/').to_owned(),
            http: Arc::clone(&http),
            timeout: Duration::from_secs_f64(config.request_timeout),
            model: OnceLock::new(),
            transfer: OnceLock::new(),
            sharing: OnceLock::new(),
            sleeps: config.sleep_mode,
        });
        let list: Vec<Server> = servers.collect();
        let down = || ServerState {
            status: Status::Down(running_time()),
            in_flight: 0,
            failures: 0,
            last_failure: None,
            must_load: false,
            is_loading: false,
            loads: 0,
            must_probe: false,
            distribution: None,
            failed_requests: 0,
            refusal: None,
        };
        Self {
            section,
            protocol,
            state: Mutex::new(State {
                servers: list.iter().map(|_| down()).collect(),
                weights: None,
                generation: 0,
                waiting_since: None,
                is_closed: false,
                is_asleep: false,
            }),
            weight_check: config.check_weights.then(|| WeightCheck::new(list.len())),
            list,
            served_model_name: config.served_model_name.clone(),
            server_timeout: Duration::from_secs_f64(config.server_timeout),
            weight_sync: format!("weight_sync: {}", Name(&config.weight_sync)),
            sleep_mode: config.sleep_mode,
            device: OnceLock::new(),
            changed: Condvar::new(),
        }
    }

    /// Lets the servers' processes receive weights from memory, in messages of about `message`
    /// bytes.
    pub(super) fn set_transport(&self, transport: &Arc<dyn TransferTransport>, message: usize) {
        for server in &self.list {
            let transfer = Transfer::new(Arc::clone(transport), message);
            let _ = server.transfer.set(transfer);
        }
    }

    /// Lets the servers read weights from `memory`, in messages of about `message` bytes.
    pub(super) fn set_shared_memory(&self, memory: &Arc<dyn SharedMemory>, message: usize) {
        for server in &self.list {
            let _ = server
                .sharing
                .set(Sharing::new(Arc::clone(memory), message));
        }
    }

    /// Sets the policy's device.
    pub(super) fn set_device(&self, device: &Device) {
        let _ = self.device.set(device.clone());
    }

    /// Connects to the processes of all servers that are up, for weights in `format`. Returns the
    /// reason if one cannot connect, and leaves the others, too.
    pub(super) fn join(&self, format: WeightFormat) -> std::result::Result<(), String> {
        let up = |index: usize| self.lock().servers[index].is_up();
        let up = (0..self.list.len()).filter(|&index| up(index));
        let mut servers = up.map(|index| &self.list[index]);
        let joined = servers.try_for_each(|server| {
            let joined = self.protocol.join(server, format);
            joined.map_err(|failure| format!("{}: {failure}", server.url))
        });
        if joined.is_err() {
            let transfers = self.list.iter().filter_map(|server| server.transfer.get());
            transfers.for_each(|transfer| *transfer.group() = None);
        }
        joined
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No code panics while it holds the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the weights that every server must serve from now on.
    pub(super) fn set_weights(&self, weights: Arc<EngineWeights>) {
        let mut state = self.lock();
        state.weights = Some(weights);
        state.is_asleep = false;
        state.generation += 1;
        state.waiting_since = None;
        for server in &mut state.servers {
            server.must_load = true;
            server.must_probe = true;
            server.refusal = None;
            if !server.is_recovering() {
                server.status = Status::Down(running_time());
            }
        }
    }

    /// Requires a probe for every server whose distribution is unknown.
    pub(super) fn require_distribution(&self) {
        let servers = &mut self.lock().servers;
        for server in servers.iter_mut().filter(|s| s.distribution.is_none()) {
            server.must_probe = true;
            if server.status == Status::Ready {
                server.status = Status::Unprobed(running_time());
            }
        }
    }

    /// Waits until a server is up and every other one is up, has failed or hangs. Returns the
    /// places of servers that wait for a probe, or `None` if `progress` cancels. The others are
    /// ready.
    ///
    /// # Errors
    ///
    /// Fails if no server becomes ready in time, or if all refuse the key.
    pub(super) fn wait(self: &Arc<Self>, progress: &dyn Progress) -> Result<Option<Vec<usize>>> {
        let begun = running_time();
        let mut state = self.lock();
        loop {
            if progress.is_canceled() {
                return Ok(None);
            }
            self.recover_due(&mut state);
            let settled = |server: &ServerState| server.is_up() || server.failures > 0;
            // A server that hangs does not block the others.
            let settled =
                state.servers.iter().all(settled) || running_time() - begun >= self.server_timeout;
            if settled && state.servers.iter().any(ServerState::is_up) {
                return Ok(Some(state.unprobed().collect()));
            }
            state = self.wait_for_change(state)?;
        }
    }

    /// Starts recovery for servers that are due, and returns the place of one that waits for a
    /// probe.
    pub(super) fn recovered(self: &Arc<Self>) -> Option<usize> {
        let mut state = self.lock();
        self.recover_due(&mut state);
        state.unprobed().next()
    }

    /// Returns whether a thread is checking a server, which may be reading the weights.
    pub(super) fn is_recovering(&self) -> bool {
        let state = self.lock();
        state.servers.iter().any(ServerState::is_recovering)
    }

    /// Returns whether the servers sleep, and need weights before they can sample.
    pub(super) fn are_asleep(&self) -> bool {
        self.lock().is_asleep
    }

    /// Lets all servers sleep until they receive weights, if they do. Returns whether they sleep.
    /// `None` if `progress` cancels. One that does not answer is assumed to have ended.
    ///
    /// # Errors
    ///
    /// Fails if a server answers that it does not sleep.
    pub(super) fn sleep(self: &Arc<Self>, progress: &dyn Progress) -> Result<Option<bool>> {
        if !self.sleep_mode || self.are_asleep() {
            return Ok(Some(self.sleep_mode));
        }
        let mut state = self.lock();
        state.is_asleep = true;
        // A server that is loading weights gets others afterward.
        state.generation += 1;
        while state.servers.iter().any(ServerState::is_recovering) {
            if progress.is_canceled() {
                return Ok(None);
            }
            let woken = self.changed.wait_timeout(state, POLL);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(state);
        let servers = Arc::clone(self);
        let sleep = move |index: usize, _: &AtomicBool| {
            let server = &servers.list[index];
            Ok(Some((index, servers.protocol.sleep(server))))
        };
        let count = self.list.len();
        let asleep = Workers::start("engine", count, 0..count, sleep)?;
        let mut left = count;
        while left > 0 {
            if progress.is_canceled() {
                return Ok(None);
            }
            let Some((index, slept)) = asleep.next()? else {
                continue;
            };
            left -= 1;
            let url = &self.list[index].url;
            match slept {
                Ok(()) => {}
                Err(failure @ Failure::Connection(_)) => {
                    tracing::warn!("{url}: {failure}; if it has not ended, it keeps its memory");
                }
                Err(failure) => {
                    self.lock().is_asleep = false;
                    bail!("{}.sleep_mode: {url}: {failure}", self.section);
                }
            }
        }
        Ok(Some(true))
    }

    /// Ends the connections to the servers that are up and have received weights from memory, best
    /// effort.
    pub(super) fn leave(&self) {
        let state = self.lock();
        let is_shared = state
            .weights
            .as_ref()
            .is_some_and(|weights| weights.format == WeightFormat::SharedMemory);
        let up: Vec<bool> = state.servers.iter().map(ServerState::is_up).collect();
        drop(state);
        for (server, is_up) in self.list.iter().zip(up) {
            let is_open = server.transfer.get().is_some_and(Transfer::is_open);
            if is_up && (is_shared || is_open) {
                self.protocol.leave(server);
            }
        }
    }

    /// Prevents servers from starting to load weights from now on. Returns whether one is loading
    /// them.
    pub(super) fn close(&self) -> bool {
        let transfers = self.list.iter().filter_map(|server| server.transfer.get());
        transfers.for_each(Transfer::close);
        let mut state = self.lock();
        state.is_closed = true;
        state.servers.iter().any(|server| server.is_loading)
    }

    /// Lets all servers unload the adapter that they serve. One that is loading it does so first.
    pub(super) fn unload(&self) {
        self.close();
        let mut state = self.lock();
        let Some(adapter) = state.weights.clone() else {
            return;
        };
        while state.servers.iter().any(|server| server.is_loading) {
            let woken = self.changed.wait(state);
            state = woken.unwrap_or_else(PoisonError::into_inner);
        }
        drop(state);
        for server in &self.list {
            if let Err(failure) = self.protocol.unload(server, &adapter.name()) {
                tracing::warn!("{}: unloading {}: {failure}", server.url, adapter.name());
            }
        }
    }

    /// Starts threads that ask the servers to end their requests, again and again until they are
    /// stopped. A server that refuses it is an error.
    pub(super) fn interrupt(self: &Arc<Self>) -> Result<Workers<()>> {
        let servers = Arc::clone(self);
        let interrupt = move |index: usize, stop: &AtomicBool| {
            let server = &servers.list[index];
            while !stop.load(Ordering::Acquire) {
                let is_busy = servers.lock().servers[index].in_flight > 0;
                let interrupted = is_busy.then(|| servers.protocol.interrupt(server));
                match interrupted.unwrap_or(Ok(())) {
                    Err(failure) if failure.is_refusal() => bail!("{}: {failure}", server.url),
                    // The requests of a server that does not answer fail, too.
                    _ => {
                        pause(INTERRUPT_INTERVAL, || stop.load(Ordering::Acquire));
                    }
                }
            }
            Ok(None)
        };
        let count = self.list.len();
        Workers::start("engine", count, 0..count, interrupt)
    }

    /// Waits before a request that has failed `tries` times is retried, at most until `stop` is
    /// set. The first retry does not wait, because another server may sample it.
    pub(super) fn pause(&self, tries: usize, stop: &AtomicBool) {
        if let Some(failures) = tries.checked_sub(1).filter(|&failures| failures > 0) {
            let duration = backoff(FIRST_BACKOFF, failures, MAX_BACKOFF);
            pause(duration, || stop.load(Ordering::Acquire));
        }
    }

    /// Leases the server at `index`, ready or not.
    pub(super) fn lease(&self, index: usize) -> Lease<'_> {
        self.lease_of(&mut self.lock(), index)
    }

    fn lease_of(&self, state: &mut State, index: usize) -> Lease<'_> {
        state.servers[index].in_flight += 1;
        Lease {
            servers: self,
            index,
            generation: state.generation,
            loads: state.servers[index].loads,
            weights: state.weights.clone(),
            distribution: state.servers[index].distribution,
        }
    }

    /// Waits for a ready server, and leases the one with the fewest requests. Returns `None` once
    /// `stop` is set.
    ///
    /// # Errors
    ///
    /// Fails in the same cases as [`Self::wait`].
    pub(super) fn acquire(self: &Arc<Self>, stop: &AtomicBool) -> Result<Option<Lease<'_>>> {
        let mut state = self.lock();
        loop {
            if stop.load(Ordering::Acquire) {
                return Ok(None);
            }
            self.recover_due(&mut state);
            let ready = state.servers.iter().enumerate();
            let ready = ready.filter(|(_, server)| server.status == Status::Ready);
            if let Some((index, _)) = ready.min_by_key(|(_, server)| server.in_flight) {
                // Under the same lock, because the server may fail and load weights right
                // afterward.
                return Ok(Some(self.lease_of(&mut state, index)));
            }
            state = self.wait_for_change(state)?;
        }
    }

    /// Calls `ask` for one server after another until there is an answer. Returns `None` once
    /// `stop` is set.
    ///
    /// # Errors
    ///
    /// Fails in the same cases as [`Self::wait`], if `ask` fails, if a server refuses the request,
    /// or after more than `max_retries` failures.
    pub(super) fn ask<T>(
        self: &Arc<Self>,
        max_retries: usize,
        stop: &AtomicBool,
        ask: impl Fn(&Lease<'_>) -> Result<Result<T, Failure>>,
    ) -> Result<Option<T>> {
        let mut tried: Vec<String> = Vec::new();
        loop {
            let Some(lease) = self.acquire(stop)? else {
                return Ok(None);
            };
            let url = lease.server().url();
            let failure = match ask(&lease)? {
                Ok(answer) => {
                    lease.succeed();
                    return Ok(Some(answer));
                }
                Err(failure) => failure,
            };
            if lease.is_refusal(&failure) {
                bail!("{url}: {failure}");
            }
            tried.push(format!("{url}: {failure}"));
            lease.fail(&failure);
            ensure!(
                tried.len() <= max_retries,
                "failed {} times: {}",
                tried.len(),
                tried.join("; ")
            );
            drop(lease);
            self.pause(tried.len(), stop);
        }
    }

    fn wait_for_change<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
    ) -> Result<MutexGuard<'a, State>> {
        if state.servers.iter().all(|server| server.refusal.is_some()) {
            let refusals = state.servers.iter_mut();
            // The next call checks again.
            let refusals: Vec<String> = refusals.filter_map(|s| s.refusal.take()).collect();
            bail!("{}", refusals.join("; "));
        }
        let is_ready = |server: &ServerState| server.status == Status::Ready;
        if state.servers.iter().any(is_ready) {
            state.waiting_since = None;
        } else {
            let since = *state.waiting_since.get_or_insert_with(running_time);
            // A recovery that started in time may finish. Without this bound, servers that
            // alternately time out would be waited for forever.
            let in_time = |server: &ServerState| match server.status {
                Status::Recovering(begun) | Status::Unprobed(begun) => {
                    begun < since + self.server_timeout
                }
                _ => false,
            };
            if running_time() - since >= self.server_timeout && !state.servers.iter().any(in_time) {
                let found = self.failures(&state);
                // The next call waits from the start.
                state.waiting_since = None;
                bail!(
                    "{}.base_url: no server is ready after {} s: {found}",
                    self.section,
                    self.server_timeout.as_secs_f64()
                );
            }
        }
        let woken = self.changed.wait_timeout(state, POLL);
        Ok(woken.unwrap_or_else(PoisonError::into_inner).0)
    }

    /// Returns each server's failures.
    fn failures(&self, state: &State) -> String {
        let servers = self.list.iter().zip(&state.servers);
        let failures = servers.map(|(server, state)| {
            let last = state.last_failure.as_deref().unwrap_or("no answer");
            format!(
                "{}: {} attempts, the last one: {last}",
                server.url, state.failures
            )
        });
        failures.collect::<Vec<_>>().join("; ")
    }

    /// Starts a thread for each server that is due.
    fn recover_due(self: &Arc<Self>, state: &mut State) {
        let now = running_time();
        for index in 0..state.servers.len() {
            if !matches!(state.servers[index].status, Status::Down(next) if next <= now) {
                continue;
            }
            let must_load = state.servers[index].must_load;
            let (weights, generation) = (state.weights.clone(), state.generation);
            let servers = Arc::clone(self);
            let started = thread::Builder::new()
                .name("engine".to_owned())
                .spawn(move || servers.recover(index, weights.as_deref(), generation, must_load));
            match started {
                Ok(_) => state.servers[index].status = Status::Recovering(now),
                Err(error) => {
                    let failure = format!("no thread can be started: {error}");
                    state.servers[index].fail(failure);
                }
            }
        }
    }

    /// Checks a server's health, and sends it the weights unless it has them.
    fn recover(
        &self,
        index: usize,
        weights: Option<&EngineWeights>,
        generation: u64,
        must_load: bool,
    ) {
        // A custom protocol may panic. The server must then not stay in recovery.
        let mut setting = None;
        let recover = || self.try_recover(index, weights, must_load, &mut setting);
        let recovered = panic::catch_unwind(AssertUnwindSafe(recover))
            .unwrap_or_else(|_| Err(Failure::Malformed("the protocol panicked".to_owned())));
        let mut state = self.lock();
        let changed = state.generation != generation;
        let is_fixed = state.weights.is_none();
        let server = &mut state.servers[index];
        server.is_loading = false;
        server.refusal = match (&recovered, setting) {
            (
                Err(
                    failure @ Failure::Status {
                        status: 401 | 403, ..
                    },
                ),
                _,
            ) => {
                let url = &self.list[index].url;
                let section = self.section;
                Some(format!(
                    "{section}.api_key_env: {url} refuses the key: {failure}"
                ))
            }
            (Err(failure @ Failure::Unsupported(_)), Some(setting)) => {
                let url = &self.list[index].url;
                Some(format!("{}.{setting}: {url}: {failure}", self.section))
            }
            _ => None,
        };
        match recovered {
            // The weights have changed in the meantime.
            _ if changed => server.status = Status::Down(running_time()),
            Ok(()) => {
                server.must_load = false;
                // Another program may answer now.
                if server.failures > 0 && (server.must_probe || is_fixed) {
                    server.distribution = None;
                }
                if server.must_probe {
                    server.status = Status::Unprobed(running_time());
                } else {
                    state.make_ready(index);
                }
            }
            Err(failure) => server.fail(failure.to_string()),
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Sets `setting` to the one that a server refuses with [`Failure::Unsupported`].
    fn try_recover(
        &self,
        index: usize,
        weights: Option<&EngineWeights>,
        must_load: bool,
        setting: &mut Option<String>,
    ) -> std::result::Result<(), Failure> {
        let server = &self.list[index];
        server.call_briefly(&self.protocol.health())?;
        if server.model.get().is_none() {
            let name = self.served_model_name.as_deref();
            let model = self.protocol.describe(server, name)?;
            let _ = server.model.set(model);
        }
        match weights {
            Some(weights) if must_load || !self.protocol.serves(server, weights)? => {
                // Before the version can change. A failed load must be repeated: it may have set
                // the version, and left the server paused.
                let mut state = self.lock();
                if state.is_closed {
                    return Err(Failure::Connection("the generator is closed".to_owned()));
                }
                let loading = &mut state.servers[index];
                loading.is_loading = true;
                loading.loads += 1;
                loading.must_load = true;
                loading.must_probe = true;
                drop(state);
                let format = weights.format;
                let transfer = |setting: &mut Option<String>| {
                    *setting = weights.live.is_some().then(|| self.weight_sync.clone());
                    self.protocol.load(server, weights)?;
                    if let Some(check) = &self.weight_check
                        && format != WeightFormat::Adapter
                    {
                        *setting = Some("check_weights".to_owned());
                        let reported = self.protocol.checksums(server);
                        let compared = reported.and_then(|r| check.compare(index, &r, weights));
                        // Other servers may sample meanwhile, so the run need not end.
                        compared
                            .inspect_err(|failure| tracing::warn!("{}: {failure}", server.url))?;
                    }
                    Ok(())
                };
                if let Some(device) = self.device.get().filter(|_| self.sleep_mode) {
                    let protocol = &*self.protocol;
                    *setting = Some("sleep_mode".to_owned());
                    let asleep = Asleep {
                        protocol,
                        server,
                        device,
                    };
                    let loaded = asleep.wake_weights()?.load(|| transfer(setting))?;
                    *setting = Some("sleep_mode".to_owned());
                    loaded.wake_cache()?;
                } else {
                    transfer(setting)?;
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        // One whose transfer has failed may still have the memory open that is freed next.
        for server in self.list.iter().filter(|server| server.shares_memory()) {
            self.protocol.leave(server);
        }
    }
}

impl State {
    /// Returns the places of servers that wait for a probe.
    fn unprobed(&self) -> impl Iterator<Item = usize> {
        let servers = self.servers.iter().enumerate();
        servers.filter_map(|(index, server)| {
            matches!(server.status, Status::Unprobed(_)).then_some(index)
        })
    }

    fn make_ready(&mut self, index: usize) {
        self.servers[index].status = Status::Ready;
        self.servers[index].failures = 0;
        self.waiting_since = None;
    }
}

impl ServerState {
    /// Returns whether it serves the weights.
    fn is_up(&self) -> bool {
        matches!(self.status, Status::Ready | Status::Unprobed(_))
    }

    fn is_recovering(&self) -> bool {
        matches!(self.status, Status::Recovering(_))
    }

    /// Sets the server aside, for longer after each failure.
    fn fail(&mut self, failure: String) {
        let failures = self.failures.max(self.failed_requests) as usize;
        let wait = backoff(FIRST_BACKOFF, failures + 1, MAX_BACKOFF);
        self.failures = self.failures.saturating_add(1);
        self.last_failure = Some(failure);
        self.status = Status::Down(running_time() + wait);
    }
}

impl Lease<'_> {
    /// Returns the server.
    pub(super) fn server(&self) -> &Server {
        &self.servers.list[self.index]
    }

    /// Returns its model's name, which adapters do not use.
    pub(super) fn model_name(&self) -> String {
        let model = self.server().model.get();
        model.map(|model| model.name.clone()).unwrap_or_default()
    }

    /// Returns the maximum number of tokens in a sequence, if the server reports it.
    pub(super) fn max_model_len(&self) -> Option<usize> {
        self.server().model.get()?.max_model_len
    }

    /// Checks that the server has room for all tokens in a completion.
    pub(super) fn ensure_fits(&self, prompt: usize, new: usize) -> Result<()> {
        let Some(longest) = self.max_model_len() else {
            return Ok(());
        };
        ensure!(
            prompt.saturating_add(new) <= longest,
            "{}: serves up to {longest} tokens, must serve {} for a prompt of {prompt} tokens and max_new_tokens {new}",
            self.server().url(),
            prompt.saturating_add(new)
        );
        Ok(())
    }

    /// Returns whether another attempt would fail too.
    fn is_refusal(&self, failure: &Failure) -> bool {
        let adapter = self.weights.as_deref();
        let adapter = adapter.is_some_and(|weights| weights.format == WeightFormat::Adapter);
        match failure {
            // A restarted server does not have the adapter.
            Failure::Status {
                status: 400 | 404, ..
            } => !adapter,
            failure => failure.is_refusal(),
        }
    }

    /// Makes the server ready, after a probe has compared its log-probs, which belong to
    /// `distribution`.
    pub(super) fn has_passed(&self, distribution: Distribution) {
        let mut state = self.servers.lock();
        let server = &mut state.servers[self.index];
        server.must_probe = false;
        server.distribution = Some(distribution);
        if matches!(server.status, Status::Unprobed(_)) {
            state.make_ready(self.index);
        }
        drop(state);
        self.servers.changed.notify_all();
    }

    /// Records that the server has answered a request.
    pub(super) fn succeed(&self) {
        self.servers.lock().servers[self.index].failed_requests = 0;
    }

    /// Returns whether the server has started loading weights since the lease began. The completion
    /// may then come from other weights than the server reports.
    pub(super) fn has_loaded_since(&self) -> bool {
        self.servers.lock().servers[self.index].loads != self.loads
    }

    /// Sets the server aside, because it failed a request.
    pub(super) fn fail(&self, failure: &Failure) {
        let mut state = self.servers.lock();
        let same = state.generation == self.generation;
        let server = &mut state.servers[self.index];
        // It has recovered from what the request encountered.
        let same = same && server.loads == self.loads;
        // Several requests may fail together.
        if same && server.is_up() {
            server.fail(failure.to_string());
            server.failed_requests = server.failed_requests.saturating_add(1);
        }
        drop(state);
        self.servers.changed.notify_all();
    }
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        self.servers.lock().servers[self.index].in_flight -= 1;
        self.servers.changed.notify_all();
    }
}
