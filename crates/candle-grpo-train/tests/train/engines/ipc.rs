//! Whole weights from memory of the policy's GPU that a server opens. Without a GPU, the memory is
//! a file.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{DType, Device, Tensor};
use candle_grpo_collective::SharedMemory;
use candle_grpo_nn::ComputeDType;
use candle_grpo_test_support::{Reply, devices, message};
use candle_grpo_train::SamplingConfig;
use candle_grpo_train::rollout::engine::ServerGenerator;
use candle_grpo_train::rollout::{Engine, RolloutConfig, WeightSync};
use rstest::rstest;
use serde_json::json;
use tempfile::TempDir;

use super::fake_server::{FakeServer, Fault};
use super::ipc_worker::{FileMemory, IpcWorker};
use super::workers::missing;
use super::{
    ALL, Policy, Setup, adapters, assert_transferred_in_order, drawn, exhausted, fail_once,
    largest, short, until_it_succeeds,
};

/// A server with a worker, and a policy on the worker's device.
pub(super) struct Sharing {
    pub(super) setup: Setup,
    pub(super) device: &'static Device,
    pub(super) files: FileMemory,
    message: usize,
    dtype: ComputeDType,
    _folder: TempDir,
}

impl Sharing {
    pub(super) fn new(sync: WeightSync, device: &'static Device) -> Self {
        let setup = Setup::new(Engine::Vllm, sync, 1);
        let folder = tempfile::tempdir().unwrap();
        let worker = IpcWorker::new(device.is_cpu().then(|| folder.path()));
        setup.servers[0].engine().ipc = Some(worker);
        Self {
            setup,
            device,
            files: FileMemory::new(folder.path()),
            message: 1000,
            dtype: ComputeDType::F32,
            _folder: folder,
        }
    }

    pub(super) fn server(&self) -> &FakeServer {
        &self.setup.servers[0]
    }

    fn worker(&self) -> IpcWorker {
        self.server().engine().ipc.clone().unwrap()
    }

    fn memory(&self) -> Arc<dyn SharedMemory> {
        #[cfg(feature = "cuda")]
        if self.device.is_cuda() {
            return Arc::new(candle_grpo_collective::CudaIpc::new(self.device).unwrap());
        }
        Arc::new(self.files.clone())
    }

    fn without_memory(&self, config: &RolloutConfig, sampling: &SamplingConfig) -> ServerGenerator {
        let client = self.setup.client_without_transport(config, sampling);
        let client = client.with_weight_dtype(self.dtype);
        client.with_message_bytes(self.message)
    }

    pub(super) fn client(&self, config: &RolloutConfig) -> Arc<ServerGenerator> {
        self.client_with(config, &short())
    }

    pub(super) fn client_with(
        &self,
        config: &RolloutConfig,
        sampling: &SamplingConfig,
    ) -> Arc<ServerGenerator> {
        let client = self.without_memory(config, sampling);
        Arc::new(client.with_shared_memory(Ok(self.memory())).unwrap())
    }

    pub(super) fn policy(&self, version: u64) -> Policy {
        let mut policy = self.setup.policy(version);
        policy.parameters = policy.parameters.copy_to(self.device).unwrap();
        policy
    }

    /// Checks that the worker has the bytes of all weights, and that no memory is left.
    pub(super) fn assert_received(&self, policy: &Policy) {
        let expected = policy.digests(self.dtype);
        assert_eq!(self.worker().digests(), expected);
        assert_eq!(self.files.freed_early(), 0);
        assert_eq!(self.files.buffers(), 0);
    }
}

/// With each weight alone, the largest one fills the buffer.
#[rstest]
#[case::several(1000)]
#[case::each_weight_alone(0)]
#[case::as_large_as_the_largest(largest())]
#[case::smaller_than_the_largest(largest() - 1)]
#[case::all(ALL)]
fn the_server_receives_the_bytes_of_all_weights(
    #[case] message: usize,
    #[values(ComputeDType::F32, ComputeDType::Bf16)] dtype: ComputeDType,
) {
    for device in devices() {
        let mut sharing = Sharing::new(WeightSync::Ipc, device);
        (sharing.message, sharing.dtype) = (message, dtype);
        let mut config = sharing.setup.config();
        if dtype == ComputeDType::Bf16 {
            config.log_prob_tolerance = 0.1;
        }
        let client = sharing.client(&config);
        for version in 1..3 {
            let policy = sharing.policy(version);
            policy.push(&client).unwrap();
            sharing.assert_received(&policy);
            let bytes = DType::from(dtype).size_in_bytes();
            let messages = sharing.worker().take_messages();
            let all: usize = policy.parameters.num_elements() * bytes;
            assert_eq!(messages.iter().sum::<usize>(), all);
            match message {
                0 => assert_eq!(messages.len(), policy.parameters.len()),
                ALL => assert_eq!(messages.len(), 1),
                _ => assert!(messages.len() > 1, "{messages:?}"),
            }
            if let Some(&size) = sharing.files.sizes().last() {
                assert_eq!(Some(&size), messages.iter().max());
            }
            if dtype == ComputeDType::F32 {
                policy.assert_drew(&drawn(&client).unwrap(), short().temperature);
            }
        }
        // No weights went through files of a model.
        assert!(!sharing.setup.folder.path().join("weights").exists());
    }
}

#[test]
fn adapters_are_merged() {
    for device in devices() {
        let sharing = Sharing::new(WeightSync::Ipc, device);
        let client = sharing.client(&sharing.setup.config());
        let mut policy = sharing.policy(0);
        (policy.version, policy.adapters) = (1, Some(adapters(1).copy_to(device).unwrap()));
        policy.push(&client).unwrap();
        sharing.assert_received(&policy);
        policy.assert_drew(&drawn(&client).unwrap(), short().temperature);
    }
}

#[test]
fn tensors_that_are_larger_than_the_buffer_are_an_error() {
    for device in devices() {
        let sharing = Sharing::new(WeightSync::Ipc, device);
        let mut buffer = sharing.memory().allocate(12).unwrap();
        let numbers = |count| Tensor::zeros(count, DType::F32, device).unwrap();
        buffer.pack(&[numbers(3)]).unwrap();
        buffer.pack(&[numbers(1), numbers(2)]).unwrap();
        let text = message(buffer.pack(&[numbers(1), numbers(3)]));
        assert!(text.contains("16 bytes, must be at most"), "{text}");
        assert!(sharing.memory().allocate(0).is_err() || device.is_cpu());
    }
}

#[test]
fn the_requests_are_in_the_order_of_the_protocol() {
    let sharing = Sharing::new(WeightSync::Ipc, &Device::Cpu);
    let client = sharing.client(&sharing.setup.config());
    sharing.policy(1).push(&client).unwrap();
    assert_transferred_in_order(sharing.server());
}

#[rstest]
#[case::processes("/get_world_size", 0, || exhausted(500))]
#[case::join("/init_weight_transfer_engine", 0, || exhausted(500))]
#[case::pause("/pause", 0, || exhausted(500))]
#[case::start("/start_weight_update", 0, || exhausted(500))]
#[case::first_message("/update_weights", 0, || exhausted(500))]
#[case::second_message("/update_weights", 1, || exhausted(500))]
#[case::no_answer("/update_weights", 1, || Fault::Instead(Reply::closed()))]
#[case::lost_answer("/update_weights", 1, || Fault::After(Box::new(|_| Reply::closed())))]
#[case::finish("/finish_weight_update", 0, || exhausted(500))]
#[case::cache("/reset_prefix_cache", 0, || exhausted(503))]
#[case::resume("/resume", 0, || exhausted(500))]
#[case::version("/weight_info", 0, || exhausted(500))]
fn a_fault_ends_the_transfer_and_the_next_one_succeeds(
    #[case] path: &'static str,
    #[case] before: usize,
    #[case] fault: fn() -> Fault,
) {
    let sharing = Sharing::new(WeightSync::Ipc, &Device::Cpu);
    let client = sharing.client(&sharing.setup.config());
    sharing.policy(1).push(&client).unwrap();
    fail_once(sharing.server(), path, before, fault);
    let policy = sharing.policy(2);
    policy.push(&client).unwrap();
    sharing.assert_received(&policy);
    policy.assert_drew(&drawn(&client).unwrap(), short().temperature);
    assert!(!sharing.server().engine().paused);
}

/// The server keeps weights of an update that it has failed, until another update ends.
#[rstest]
#[case::first(0)]
#[case::second(1)]
fn an_update_that_the_server_fails_leaves_no_weights(#[case] before: usize) {
    let sharing = Sharing::new(WeightSync::Ipc, &Device::Cpu);
    let client = sharing.client(&sharing.setup.config());
    sharing.policy(1).push(&client).unwrap();
    sharing.worker().fail_after(before);
    let policy = sharing.policy(2);
    policy.push(&client).unwrap();
    sharing.assert_received(&policy);
    policy.assert_drew(&drawn(&client).unwrap(), short().temperature);
}

/// The run ends after a failed transfer, in which the server still has the memory open.
#[test]
fn memory_is_freed_once_the_server_has_closed_it() {
    let sharing = Sharing::new(WeightSync::Ipc, &Device::Cpu);
    let client = sharing.client(&sharing.setup.impatient());
    until_it_succeeds(|| sharing.policy(1).push(&client));
    let has_ended = Arc::new(AtomicBool::new(false));
    let ended = Arc::clone(&has_ended);
    sharing
        .server()
        .set_faults(move |request| match request.path() {
            "/update_weights" => Some(Fault::After(Box::new(|_| Reply::closed()))),
            "/finish_weight_update" if !ended.load(Ordering::SeqCst) => {
                Some(Fault::Instead(Reply::closed()))
            }
            _ => None,
        });
    sharing.policy(2).push(&client).unwrap_err();
    assert_eq!(sharing.files.buffers(), 1);
    has_ended.store(true, Ordering::SeqCst);
    drop(client);
    // A thread may still send weights.
    while sharing.files.buffers() > 0 {
        std::thread::yield_now();
    }
    assert_eq!(sharing.files.freed_early(), 0);
}

#[test]
fn a_server_that_does_not_answer_is_an_error_within_the_limit() {
    let sharing = Sharing::new(WeightSync::Ipc, &Device::Cpu);
    let mut config = sharing.setup.impatient();
    config.request_timeout = 1.;
    let client = sharing.client(&config);
    until_it_succeeds(|| sharing.policy(1).push(&client));
    let server = sharing.server();
    server.set_faults(|request| (request.path() == "/update_weights").then(Fault::held));
    let policy = sharing.policy(2);
    let error = policy.push(&client).unwrap_err();
    sharing.setup.assert_names_a_server(&error);
    // The server may still have it open.
    assert_eq!(sharing.files.freed_early(), 0);
    server.set_faults(|_| None);
    server.http.release();
    server.restart();
    until_it_succeeds(|| policy.push(&client));
    sharing.assert_received(&policy);
}

#[test]
fn a_server_that_restarts_within_a_step_receives_the_weights_again() {
    let sharing = Sharing::new(WeightSync::Ipc, &Device::Cpu);
    let client = sharing.client(&sharing.setup.config());
    let policy = sharing.policy(3);
    policy.push(&client).unwrap();
    sharing.server().restart();
    policy.assert_drew(&drawn(&client).unwrap(), short().temperature);
    sharing.assert_received(&policy);
}

/// The server was started for one of them, or for none.
#[test]
fn auto_uses_what_the_server_was_started_for() {
    let sharing = Sharing::new(WeightSync::Auto, &Device::Cpu);
    let client = || {
        let client = sharing.without_memory(&sharing.setup.config(), &short());
        let network = Arc::new(sharing.setup.network.clone());
        let client = client.with_transport(Ok(network)).unwrap();
        Arc::new(client.with_shared_memory(Ok(sharing.memory())).unwrap())
    };
    let policy = sharing.policy(1);
    policy.push(&client()).unwrap();
    sharing.assert_received(&policy);
    assert_eq!(sharing.setup.network.groups(), 0);

    sharing.server().engine().ipc = None;
    sharing.setup.set_processes(2);
    policy.push(&client()).unwrap();
    assert_eq!(sharing.setup.network.groups(), 1);

    sharing.server().engine().workers = None;
    let client = client();
    policy.push(&client).unwrap();
    assert_eq!(sharing.setup.versions(), ["policy-000001"]);
    policy.assert_drew(&drawn(&client).unwrap(), short().temperature);
}

/// An error names the setting as it was given.
#[test]
fn a_server_that_no_longer_receives_weights_is_an_error_that_names_auto() {
    let sharing = Sharing::new(WeightSync::Auto, &Device::Cpu);
    let client = sharing.client(&sharing.setup.impatient());
    until_it_succeeds(|| sharing.policy(1).push(&client));
    sharing.server().engine().ipc = None;
    let error = sharing.policy(2).push(&client).unwrap_err();
    let text = format!("{error:#}");
    assert!(
        text.starts_with("rollout.weight_sync: auto: http"),
        "{text}"
    );
    assert!(text.contains(r#"{"backend":"ipc"}"#), "{text}");
}

#[test]
fn ipc_that_cannot_work_is_refused_with_the_reason() {
    let sharing = Sharing::new(WeightSync::Ipc, &Device::Cpu);
    let config = sharing.setup.impatient();
    let found = message(
        sharing
            .without_memory(&config, &short())
            .with_shared_memory(Err(missing())),
    );
    let must = "rollout.weight_sync: ipc, must be auto, adapter or disk: the policy is on the CPU";
    assert_eq!(found, must);
    let client = sharing.without_memory(&config, &short());
    let error = sharing.policy(1).push(&client).unwrap_err();
    let must = "rollout.weight_sync: ipc, must be auto, adapter or disk: this program sets no shared memory";
    assert_eq!(error.to_string(), must);
    sharing.server().set_faults(|request| {
        let more = |answer: &mut serde_json::Value| answer["world_size"] = json!(2);
        (request.path() == "/get_world_size").then(|| Fault::json(more))
    });
    let error = sharing.policy(1).push(&sharing.client(&config));
    let text = format!("{:#}", error.unwrap_err());
    assert!(text.starts_with("rollout.weight_sync: ipc: http"), "{text}");
    assert!(text.contains("world_size: 2, must be 1"), "{text}");
}

#[rstest]
#[case::ipc(WeightSync::Ipc, 1)]
#[case::nccl(WeightSync::Nccl, 1)]
#[case::disk(WeightSync::Disk, 0)]
fn the_end_of_a_run_ends_the_connection(#[case] sync: WeightSync, #[case] requests: usize) {
    let sharing = Sharing::new(sync, &Device::Cpu);
    if sync == WeightSync::Nccl {
        sharing.server().engine().ipc = None;
    }
    let client = sharing.without_memory(&sharing.setup.config(), &short());
    let network = Arc::new(sharing.setup.network.clone());
    let client = client.with_transport(Ok(network)).unwrap();
    let client = client.with_shared_memory(Ok(sharing.memory())).unwrap();
    sharing.policy(1).push(&client).unwrap();
    let path = "/shutdown_weight_transfer_engine";
    assert_eq!(sharing.server().count(path), 0);
    drop(client);
    assert_eq!(sharing.server().count(path), requests);
}
