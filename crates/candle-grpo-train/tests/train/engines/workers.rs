//! The processes of a fake vLLM server that receive weights over NCCL, and the policy's side of
//! their group. As with NCCL, each operation waits for all ranks without a limit, also for those
//! that have ended.

use std::collections::{BTreeMap, HashMap};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use candle_core::{DType, Error, Result, Tensor, bail};
use candle_grpo_collective::{GroupId, TransferGroup, TransferTransport, Waiting};
use candle_grpo_test_support::device;
use serde_json::Value;
use sha2::{Digest, Sha256};

/// Time between two checks of an operation.
const INTERVAL: Duration = Duration::from_millis(1);

/// The groups of a test, which its servers and its policy share.
#[derive(Clone, Default)]
pub(crate) struct Network(Arc<Groups>);

#[derive(Default)]
struct Groups {
    /// Ranks that have entered a group. `None` if the policy has left.
    entered: Mutex<HashMap<GroupId, Option<Ranks>>>,
    changed: Condvar,
    ids: Mutex<u64>,
    /// Lengths of all messages that were sent.
    sent: Mutex<Vec<usize>>,
}

/// The group's size as each rank has it, and the sender of its messages.
type Ranks = BTreeMap<usize, (usize, SyncSender<Message>)>;

type Message = Arc<Vec<u8>>;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Network {
    /// Number of identifiers that the policy has made.
    pub(crate) fn groups(&self) -> u64 {
        *lock(&self.0.ids)
    }

    /// Returns the lengths of the messages since the last call.
    pub(crate) fn take_sent(&self) -> Vec<usize> {
        std::mem::take(&mut lock(&self.0.sent))
    }

    /// Enters a group as a process. Its first message comes once all ranks have entered.
    fn enter(&self, id: GroupId, rank: usize, size: usize) -> Receiver<Message> {
        let (sender, messages) = sync_channel(0);
        let mut entered = lock(&self.0.entered);
        let ranks = entered.entry(id).or_insert_with(|| Some(Ranks::new()));
        if let Some(ranks) = ranks {
            assert!(ranks.insert(rank, (size, sender)).is_none(), "rank {rank}");
        }
        self.0.changed.notify_all();
        messages
    }
}

impl TransferTransport for Network {
    fn new_id(&self) -> Result<GroupId> {
        let mut ids = lock(&self.0.ids);
        *ids += 1;
        let mut id = [0xfb; 128];
        id[..8].copy_from_slice(&ids.to_le_bytes());
        Ok(id)
    }

    fn connect(
        &self,
        id: &GroupId,
        receivers: usize,
        waiting: &mut Waiting<'_>,
    ) -> Result<Box<dyn TransferGroup>> {
        let mut entered = lock(&self.0.entered);
        let ranks = loop {
            let ranks = entered.entry(*id).or_insert_with(|| Some(Ranks::new()));
            let are_all = ranks.as_ref().is_some_and(|ranks| {
                let agree = ranks.values().all(|(size, _)| *size == receivers + 1);
                agree && ranks.keys().copied().eq(1..=receivers)
            });
            if are_all {
                break ranks.take().unwrap_or_default();
            }
            drop(entered);
            let go_on = waiting();
            entered = lock(&self.0.entered);
            if let Err(error) = go_on {
                // NCCL would leave them waiting, and the test, too.
                entered.insert(*id, None);
                return Err(error);
            }
            let changed = self.0.changed.wait_timeout(entered, INTERVAL);
            entered = changed.unwrap_or_else(PoisonError::into_inner).0;
        };
        drop(entered);
        let mut group = Group {
            network: self.clone(),
            receivers: ranks.into_values().map(|(_, sender)| sender).collect(),
            message: 1f32.to_le_bytes().to_vec(),
        };
        // The sum with which the workers begin.
        group.send(waiting)?;
        Ok(Box::new(group))
    }
}

struct Group {
    network: Network,
    receivers: Vec<SyncSender<Message>>,
    message: Vec<u8>,
}

impl TransferGroup for Group {
    fn pack(&mut self, tensors: &[Tensor]) -> Result<()> {
        self.message.clear();
        tensors.iter().try_for_each(|tensor| {
            assert!(tensor.is_contiguous());
            tensor.write_bytes(&mut self.message)
        })
    }

    fn send(&mut self, waiting: &mut Waiting<'_>) -> Result<()> {
        let message = Arc::new(std::mem::take(&mut self.message));
        for receiver in &self.receivers {
            // A rank that has ended receives nothing, and NCCL does not notice.
            while let Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) =
                receiver.try_send(Arc::clone(&message))
            {
                waiting()?;
                thread::sleep(INTERVAL);
            }
        }
        lock(&self.network.0.sent).push(message.len());
        Ok(())
    }
}

/// The processes of a server.
pub(crate) struct Workers {
    network: Network,
    /// Their number: tensor parallel size times data parallel size.
    count: usize,
    /// The process that has ended.
    killed: Option<usize>,
    joined: Joined,
}

/// The processes in a group.
#[derive(Clone, Default)]
pub(crate) struct Joined {
    workers: Vec<Arc<Mutex<Worker>>>,
    /// The limit for messages.
    limit: usize,
}

/// Processes that join a group.
pub(crate) struct Joining {
    network: Network,
    ranks: Vec<usize>,
}

struct Worker {
    messages: Receiver<Message>,
    /// SHA-256 of each weight that it has received.
    digests: Digests,
}

/// SHA-256 by the name of the weight.
pub(crate) type Digests = BTreeMap<String, Vec<u8>>;

/// A weight that a request announces.
pub(crate) struct Announced {
    pub(crate) name: String,
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
}

impl Announced {
    fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.size_in_bytes()
    }
}

impl Workers {
    pub(crate) fn new(network: Network, count: usize) -> Self {
        Self {
            network,
            count,
            killed: None,
            joined: Joined::default(),
        }
    }

    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Starts all processes again, which are in no group.
    pub(crate) fn restart(&mut self) {
        *self = Self::new(self.network.clone(), self.count);
    }

    /// Ends the process with this number, until a restart.
    pub(crate) fn kill(&mut self, index: usize) {
        self.killed = Some(index);
        self.joined.workers.remove(index);
    }

    /// Returns the weights that each process has received.
    pub(crate) fn digests(&self) -> Vec<Digests> {
        let workers = self.joined.workers.iter();
        workers.map(|worker| lock(worker).digests.clone()).collect()
    }

    pub(crate) fn joining(&self) -> Joining {
        let ranks = (0..self.count).filter(|index| Some(*index) != self.killed);
        Joining {
            network: self.network.clone(),
            ranks: ranks.collect(),
        }
    }

    pub(crate) fn set(&mut self, joined: Joined) {
        self.joined = joined;
    }

    pub(crate) fn joined(&self) -> Joined {
        self.joined.clone()
    }
}

impl Joining {
    /// Joins the group in the body of a request, and waits for the policy.
    pub(crate) fn join(&self, body: &Value) -> std::result::Result<Joined, String> {
        let info = &body["init_info"];
        let number = |name: &str| {
            let number = info[name].as_u64().ok_or_else(|| format!("{name}: absent"));
            number.map(|number| number as usize)
        };
        let id = info["nccl_unique_id_b64"].as_str().unwrap_or_default();
        let id = STANDARD.decode(id).map_err(|e| e.to_string())?;
        let id: GroupId = id
            .try_into()
            .map_err(|_| "nccl_unique_id_b64: not 128 bytes")?;
        if info["packed"] != true || info["packed_num_buffers"] != 2 {
            return Err(format!("{info}: not packed"));
        }
        let (offset, size) = (number("rank_offset")?, number("world_size")?);
        let ranks = self.ranks.iter();
        let messages: Vec<_> = ranks
            .map(|index| self.network.enter(id, offset + index, size))
            .collect();
        let mut joined = Joined {
            workers: Vec::new(),
            limit: number("packed_buffer_size_bytes")?,
        };
        for messages in messages {
            // The first operation is the sum of one f32.
            let sum = messages.recv().map_err(|_| "the policy has left")?;
            assert_eq!(sum.len(), 4);
            let digests = Digests::new();
            let worker = Worker { messages, digests };
            joined.workers.push(Arc::new(Mutex::new(worker)));
        }
        Ok(joined)
    }
}

impl Joined {
    /// Receives the weights in the body of a request, as vLLM's workers do. Returns those of the
    /// first process.
    pub(crate) fn receive(
        &self,
        body: &Value,
    ) -> std::result::Result<HashMap<String, Tensor>, String> {
        let announced = announced(&body["update_info"])?;
        if self.workers.is_empty() {
            return Err("Weight transfer is not initialized".to_owned());
        }
        let (announced, limit) = (&announced, self.limit);
        let received: Vec<Result<_>> = thread::scope(|scope| {
            let receive = |worker: &Arc<Mutex<Worker>>| {
                let worker = Arc::clone(worker);
                scope.spawn(move || lock(&worker).receive(announced, limit))
            };
            let threads: Vec<_> = self.workers.iter().map(receive).collect();
            threads.into_iter().map(|of| of.join().unwrap()).collect()
        });
        let received: Result<Vec<_>> = received.into_iter().collect();
        let mut received = received.map_err(|error| error.to_string())?;
        Ok(received.swap_remove(0))
    }
}

impl Worker {
    fn receive(
        &mut self,
        announced: &[Announced],
        limit: usize,
    ) -> Result<HashMap<String, Tensor>> {
        let mut weights = HashMap::new();
        self.digests.clear();
        let mut next = announced.iter().peekable();
        while next.peek().is_some() {
            let (mut message, mut length) = (Vec::new(), 0);
            for weight in next.by_ref() {
                length += weight.bytes();
                message.push(weight);
                if length > limit {
                    break;
                }
            }
            let Ok(bytes) = self.messages.recv() else {
                bail!("the policy has left");
            };
            if bytes.len() != length {
                bail!("a message of {} bytes, must be {length}", bytes.len());
            }
            let mut rest = &bytes[..];
            for weight in message {
                let (own, after) = rest.split_at(weight.bytes());
                rest = after;
                let name = &weight.name;
                self.digests
                    .insert(name.clone(), Sha256::digest(own).to_vec());
                let tensor = Tensor::from_raw_buffer(own, weight.dtype, &weight.shape, device())?;
                weights.insert(name.clone(), tensor.to_dtype(DType::F32)?);
            }
        }
        Ok(weights)
    }
}

pub(crate) fn announced(info: &Value) -> std::result::Result<Vec<Announced>, String> {
    let list = |name: &str| {
        info[name]
            .as_array()
            .ok_or_else(|| format!("{name}: absent"))
    };
    let (names, dtypes, shapes) = (list("names")?, list("dtype_names")?, list("shapes")?);
    if names.len() != dtypes.len() || names.len() != shapes.len() {
        return Err("lists of different lengths".to_owned());
    }
    let weights = names.iter().zip(dtypes).zip(shapes);
    let weights = weights.map(|((name, dtype), shape)| {
        Ok(Announced {
            name: name.as_str().ok_or("a name")?.to_owned(),
            dtype: match dtype.as_str() {
                Some("bfloat16") => DType::BF16,
                Some("float32") => DType::F32,
                other => return Err(format!("dtype {other:?}")),
            },
            shape: serde_json::from_value(shape.clone()).map_err(|e| e.to_string())?,
        })
    });
    weights.collect()
}

/// The error of a library that is not installed.
pub(crate) fn missing() -> Error {
    Error::msg("the policy is on the CPU")
}
