//! The memory of a configured run.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use candle_grpo_collective::launch;
use candle_grpo_core::validate::Name;
use candle_grpo_nn::optim::{Sharding, StateMemory};
use candle_grpo_nn::{AdamWConfig, BaseWeights, DecoderConfig, Gguf};
use candle_grpo_train::data::read_json;
use candle_grpo_train::learn::{Draws, MemoryFit, MemoryPlan};
use candle_grpo_train::sft::{SftConfig, SftDataset};
use candle_grpo_train::{ComputeDType, Prompt, RunDir, TrainConfig, cuda_is_enabled, cuda_memory};
use serde_json::Value;

use super::model::device;
use super::prompts::RunPrompts;
use super::resume::CONFIG;
use crate::config::{Configuration, RunConfig, SftRunConfig};

/// The share of free memory that a plan may take, in percent.
const USED_PERCENT: usize = 95;

/// The memory of a run, on this process's device.
///
/// Create it after the data and the tokenizer are read, and before the weights are.
pub struct RunMemory<'a> {
    run: &'a RunConfig,
    model: &'a DecoderConfig,
    prompts: &'a RunPrompts,
    process: ThisProcess,
    /// The memory of each rank, if it is known.
    budget: Option<MemoryBudget>,
    /// The bytes of main memory that each rank may take beside a GPU.
    host_bytes: Option<usize>,
}

impl<'a> RunMemory<'a> {
    /// Creates the memory of a run with this model and these prompts. It has as many ranks as this
    /// process's job, or `ranks`.
    ///
    /// # Errors
    ///
    /// Returns an error if a GGUF file cannot be read, or the device does not respond.
    pub fn new(
        run: &'a RunConfig,
        model: &'a DecoderConfig,
        prompts: &'a RunPrompts,
        ranks: Option<usize>,
    ) -> Result<Self> {
        let process = ThisProcess::new(run, ranks)?;
        Ok(Self {
            run,
            model,
            prompts,
            budget: MemoryBudget::of(run.max_memory_mib, process.ranks)?,
            host_bytes: MemoryBudget::of_host(process.ranks),
            process,
        })
    }

    /// Returns the plan with the settings `train`.
    ///
    /// # Errors
    ///
    /// Returns an error if the settings are not valid.
    pub fn plan(&self, train: &TrainConfig) -> Result<MemoryPlan> {
        let ranks = self.process.ranks;
        let plan = self.prompts.memory_plan(train, self.model, ranks)?;
        let evaluation = &self.run.evaluation;
        let held_out = evaluation.select(&self.prompts.held_out);
        let plan = match evaluation.every_steps {
            None => plan,
            Some(_) => {
                let draws = Draws {
                    prompts: held_out.len(),
                    samples_per_prompt: evaluation.samples_per_prompt,
                    prompt_tokens: Prompt::longest(held_out),
                    sampling: &evaluation.sampler,
                };
                plan.with_evaluation(self.model, train, draws)?
            }
        };
        let merges = train.rollout.merge_adapters;
        self.process.added_to(plan, train.stored_form(), merges)
    }

    /// Returns the plans of what the ranks of the job can divide, with the settings `train`. If the
    /// run chooses its number of tokens in a micro-batch, each plan has its own.
    ///
    /// # Errors
    ///
    /// Returns an error if the settings are not valid.
    pub fn plans_of_ranks(&self, train: &TrainConfig) -> Result<RankPlans> {
        let plan = |train: &TrainConfig| self.plan(train);
        let budget = self.budget;
        let plans = self.process.plans_of_ranks(|sharding| {
            let mut train = TrainConfig {
                sharding,
                ..train.clone()
            };
            // Some settings exclude what ranks can divide.
            if train.validate().is_err() {
                return Ok(None);
            }
            if self.run.train.fits_micro_batches()
                && let Some(budget) = budget
                && let Some(tokens) = self.fit(budget, &plan).micro_batch_tokens(&train)?
            {
                train.micro_batch_tokens = Some(tokens.into());
            }
            self.plan(&train).map(Some)
        })?;
        Ok(RankPlans {
            plans,
            budget,
            host_bytes: self.host_bytes,
        })
    }

    /// Chooses the number of tokens in a micro-batch for `micro_batch_tokens: auto`.
    ///
    /// # Errors
    ///
    /// Returns an error with the sizes, and with changes that help, if the run does not fit.
    pub fn fitted_tokens(&self) -> Result<usize> {
        let Some(budget) = self.budget else {
            bail!(
                "micro_batch_tokens: auto, must be a number, or max_memory_mib must be given, on a system that does not report its free memory"
            )
        };
        let plan = |train: &TrainConfig| self.plan(train);
        let fit = self.fit(budget, &plan);
        if let Some(tokens) = fit.micro_batch_tokens(&self.run.train)? {
            return Ok(tokens);
        }
        let changes = advice(fit.smallest_change(&self.run.train));
        let mut smallest = self.run.train.clone();
        smallest.micro_batch_tokens = Some(1.into());
        if let Some(more) = self.more_than_host(&self.plan(&smallest)?) {
            bail!("micro_batch_tokens: auto, but the run takes {more}; {changes}")
        }
        bail!(
            "micro_batch_tokens: auto, but the longest sequence does not fit into {budget}; {changes}"
        )
    }

    /// Returns the settings to change so that the run, which has this plan, fits into the device's
    /// memory: `None` if it fits, or if the free memory is unknown.
    pub fn advice(&self, plan: &MemoryPlan) -> Option<String> {
        let budget = self.budget?;
        let more = self
            .more_than_host(plan)
            .or_else(|| more_than_device(plan, budget))?;
        let plan = |train: &TrainConfig| self.plan(train);
        let changes = self.fit(budget, &plan).smallest_change(&self.run.train);
        Some(format!("{more}; {}", advice(changes)))
    }

    fn more_than_host(&self, plan: &MemoryPlan) -> Option<String> {
        let train = &self.run.train;
        let critic = train.critic.as_ref().map(|critic| &critic.optimizer);
        let keys = [
            (is_on_host(&train.optimizer), "optimizer.memory: host"),
            (
                critic.is_some_and(is_on_host),
                "critic.optimizer.memory: host",
            ),
            (train.activation_offloading, "activation_offloading: true"),
        ];
        more_than_host(plan, self.host_bytes, &keys)
    }

    fn fit<'f>(
        &'f self,
        budget: MemoryBudget,
        plan: &'f dyn Fn(&TrainConfig) -> Result<MemoryPlan>,
    ) -> MemoryFit<'f> {
        MemoryFit {
            bytes: budget.bytes,
            host_bytes: self.host_bytes,
            model: self.model,
            prompt_tokens: Prompt::longest(&self.prompts.train),
            plan,
        }
    }
}

/// Says that a plan takes too much main memory beside a GPU, if it does, with those of the keys
/// that are set.
fn more_than_host(
    plan: &MemoryPlan,
    host_bytes: Option<usize>,
    keys: &[(bool, &str)],
) -> Option<String> {
    let free = host_bytes.filter(|&free| plan.host > free)?;
    let (host, free) = (plan.host >> 20, free >> 20);
    let keys = keys
        .iter()
        .filter_map(|(is_set, key)| is_set.then_some(*key));
    let keys = keys.collect::<Vec<_>>().join(", ");
    Some(format!(
        "{host} MiB of main memory ({keys}), more than {free} MiB ({USED_PERCENT}% of the free memory)"
    ))
}

/// Says that a plan takes too much memory of the device, if it does.
fn more_than_device(plan: &MemoryPlan, budget: MemoryBudget) -> Option<String> {
    (plan.peak() > budget.bytes).then(|| format!("more than {budget}"))
}

fn is_on_host(optimizer: &AdamWConfig) -> bool {
    optimizer.memory == StateMemory::Host
}

/// The memory of a supervised run.
#[derive(Debug, Clone)]
pub struct SftMemory {
    /// The plan on this process's device, as in [`RunMemory::plan`].
    pub plan: MemoryPlan,
    /// Says what does not fit. `None` if all does, or if the free memory is unknown.
    pub excess: Option<String>,
    /// The plans of what several ranks can divide.
    pub of_ranks: RankPlans,
}

/// Returns the memory of a supervised run on `dataset`. There are as many ranks as in the job, or
/// `ranks`.
///
/// # Errors
///
/// Returns an error if the settings are not valid, or a GGUF file cannot be read.
pub fn sft_memory(
    run: &SftRunConfig,
    model: &DecoderConfig,
    dataset: &SftDataset,
    ranks: Option<usize>,
) -> Result<SftMemory> {
    let process = ThisProcess::new(run, ranks)?;
    let longest = dataset.train.longest_kept();
    let plan = |sft: &SftConfig| {
        let plan = MemoryPlan::supervised(model, sft, longest, process.ranks)?;
        process.added_to(plan, run.stored_form(), false)
    };
    let plans = process.plans_of_ranks(|sharding| {
        let sft = SftConfig {
            sharding,
            ..run.sft.clone()
        };
        // Some settings exclude what ranks can divide.
        if sft.validate().is_err() {
            return Ok(None);
        }
        plan(&sft).map(Some)
    })?;
    // The run does not need to know the free memory.
    let budget = MemoryBudget::of(None, process.ranks).ok().flatten();
    let host_bytes = MemoryBudget::of_host(process.ranks);
    let plan = plan(&run.sft)?;
    let keys = [
        (is_on_host(&run.sft.optimizer), "optimizer.memory: host"),
        (
            run.sft.activation_offloading,
            "sft.activation_offloading: true",
        ),
    ];
    let excess =
        more_than_host(&plan, host_bytes, &keys).or_else(|| more_than_device(&plan, budget?));
    Ok(SftMemory {
        plan,
        excess,
        of_ranks: RankPlans {
            plans,
            budget,
            host_bytes,
        },
    })
}

/// The plans of what the ranks of a job can divide.
#[derive(Debug, Clone)]
pub struct RankPlans {
    /// Each with its [`TrainConfig::sharding`], from the one that divides least. None for one
    /// rank.
    pub plans: Vec<(Sharding, MemoryPlan)>,
    /// The memory of each rank, if it is known.
    budget: Option<MemoryBudget>,
    /// The bytes of main memory that each rank may take beside a GPU.
    host_bytes: Option<usize>,
}

impl RankPlans {
    /// Returns the sharding to choose, and the memory of a rank: the one that divides least and
    /// fits. This is not `none`, because `optimizer` takes less memory, and over NCCL as much time.
    /// `None` for one rank, or if the memory is unknown.
    pub fn advice(&self) -> Option<String> {
        let budget = self.budget.filter(|_| !self.plans.is_empty())?;
        let has_room = |plan: &MemoryPlan| {
            let has_main_memory = self.host_bytes.is_none_or(|free| plan.host <= free);
            has_main_memory && plan.peak() <= budget.bytes
        };
        let mut plans = self.plans.iter();
        let fits = plans.find(|(sharding, plan)| *sharding != Sharding::None && has_room(plan));
        Some(match fits {
            Some((sharding, _)) => format!("sharding: {} fits into {budget}", Name(sharding)),
            None => format!("no sharding fits into {budget}"),
        })
    }
}

/// The parts of a plan that depend on this process and its files.
struct ThisProcess {
    /// The file whose blocks stay as they are stored.
    gguf: Option<Gguf>,
    /// The program itself, in bytes.
    program: usize,
    /// The number of ranks in the run.
    ranks: usize,
}

impl ThisProcess {
    /// Reads the memory of this process, with the number of ranks in its job unless `ranks` is
    /// given.
    fn new(run: &impl Configuration, ranks: Option<usize>) -> Result<Self> {
        let model = &run.model().path;
        let is_stored = run.stored_form().0 == BaseWeights::Stored && !model.is_dir();
        Ok(Self {
            gguf: is_stored.then(|| Gguf::open(model)).transpose()?,
            program: peak_of_this_process().unwrap_or(0),
            ranks: match ranks {
                Some(ranks) => ranks,
                None => launch::environment()?.map_or(1, |found| found.world_size),
            },
        })
    }

    /// Returns `plan` of everything that several ranks can divide.
    fn plans_of_ranks(
        &self,
        plan: impl Fn(Sharding) -> Result<Option<MemoryPlan>>,
    ) -> Result<Vec<(Sharding, MemoryPlan)>> {
        let all: &[Sharding] = match self.ranks {
            1 => &[],
            _ => &[
                Sharding::None,
                Sharding::Optimizer,
                Sharding::Resident,
                Sharding::Full,
            ],
        };
        let plans = all
            .iter()
            .map(|&sharding| Ok(plan(sharding)?.map(|plan| (sharding, plan))));
        plans.filter_map(Result::transpose).collect()
    }

    /// Adds the program itself to a plan. GGUF blocks count as they are stored, unless completions
    /// are drawn from `merged` copies.
    fn added_to(
        &self,
        mut plan: MemoryPlan,
        (base, dtype): (BaseWeights, ComputeDType),
        merged: bool,
    ) -> Result<MemoryPlan> {
        if let (BaseWeights::Stored, Some(gguf)) = (base, &self.gguf) {
            plan.frozen = gguf.frozen_bytes(base, dtype.into())?;
            if !merged {
                // Blocks are not packed, and a copy of another weight has the size of the weight.
                plan.packed = plan.packed.min(plan.frozen);
            }
        }
        // The memory of the plan is that of a GPU, if there is one.
        Ok(if cuda_is_enabled() {
            plan
        } else {
            plan.in_program(self.program)
        })
    }
}

/// Returns this process's peak resident memory, after it has read the data and the tokenizer but no
/// weights. `None` on systems without `/proc`.
fn peak_of_this_process() -> Option<usize> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    kib_of(&status, "VmHWM:")
}

/// Returns the bytes in the line of `text` that begins with `name`.
fn kib_of(text: &str, name: &str) -> Option<usize> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: usize = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib << 10)
}

/// The memory that a run may take.
#[derive(Debug, Clone, Copy)]
struct MemoryBudget {
    /// The largest peak of the run's plan.
    bytes: usize,
    /// True if `max_memory_mib` gives it, false if it is a share of the free memory.
    is_given: bool,
}

impl MemoryBudget {
    /// Returns the budget of one of `ranks`: `max_memory_mib`, or 95% of this device's free memory.
    /// On the CPU, the ranks share the latter. `None` if the free memory is unknown.
    ///
    /// # Errors
    ///
    /// Returns an error if the device does not respond.
    fn of(max_memory_mib: Option<usize>, ranks: usize) -> Result<Option<Self>> {
        if let Some(mib) = max_memory_mib {
            return Ok(Some(Self {
                bytes: mib.saturating_mul(1 << 20),
                is_given: true,
            }));
        }
        let bytes = if cuda_is_enabled() {
            Some(cuda_memory(&device()?)?.free / 100 * USED_PERCENT)
        } else {
            Self::of_host(ranks)
        };
        Ok(bytes.map(|bytes| Self {
            bytes,
            is_given: false,
        }))
    }

    /// Returns 95% of the free main memory, for one of `ranks` that share it. `None` if it is
    /// unknown.
    fn of_host(ranks: usize) -> Option<usize> {
        let free = free_memory(Path::new("/"))?;
        Some(free / ranks / 100 * USED_PERCENT)
    }
}

impl fmt::Display for MemoryBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = self.bytes >> 20;
        if self.is_given {
            write!(f, "{mib} MiB (max_memory_mib)")
        } else {
            write!(f, "{mib} MiB ({USED_PERCENT}% of the free memory)")
        }
    }
}

/// Returns the memory that this process can still take: that of the machine, and of each control
/// group above the process that has a limit. `root` is the folder with `proc` and `sys`.
fn free_memory(root: &Path) -> Option<usize> {
    let read = |path: &Path| fs::read_to_string(root.join(path)).ok();
    let machine = kib_of(&read(Path::new("proc/meminfo"))?, "MemAvailable:")?;
    let groups = read(Path::new("proc/self/cgroup")).unwrap_or_default();
    let own = groups.lines().find_map(|line| line.strip_prefix("0::/"));
    let mut folder = PathBuf::from("sys/fs/cgroup").join(own.unwrap_or_default());
    let mut free = machine;
    while folder.starts_with("sys/fs/cgroup") {
        let number = |name| read(&folder.join(name))?.trim().parse::<usize>().ok();
        // A limit of `max` is none.
        if let (Some(limit), Some(used)) = (number("memory.max"), number("memory.current")) {
            let statistics = read(&folder.join("memory.stat")).unwrap_or_default();
            let files = statistics
                .lines()
                .find_map(|line| line.strip_prefix("inactive_file "))
                .and_then(|bytes| bytes.trim().parse().ok());
            // The system releases cached files when memory is short.
            let used = used.saturating_sub(files.unwrap_or(0));
            free = free.min(limit.saturating_sub(used));
        }
        folder.pop();
    }
    Some(free)
}

fn advice(changes: Option<Vec<String>>) -> String {
    match changes {
        Some(changes) => format!("to fit, set {}", changes.join(" and ")),
        None => "no smaller setting is enough: choose a smaller model, or shorter prompts and completions".to_owned(),
    }
}

/// Returns the number of tokens in a micro-batch with which the run in `run_dir` started. `None` if
/// there is no run, or it had no such number.
pub fn recorded_micro_batch_tokens(run_dir: &Path) -> Option<usize> {
    if !RunDir::is_run(run_dir) {
        return None;
    }
    let settings: Value = read_json(&run_dir.join(CONFIG)).ok()?;
    usize::try_from(settings.get("micro_batch_tokens")?.as_u64()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case::fits(Some(8), None)]
    #[case::unknown(None, None)]
    #[case::too_large(
        Some(7),
        Some(
            "8 MiB of main memory (optimizer.memory: host), more than 7 MiB (95% of the free memory)"
        )
    )]
    fn main_memory_that_is_missing_is_named_with_the_keys_that_take_it(
        #[case] free_mib: Option<usize>,
        #[case] expected: Option<&str>,
    ) {
        let plan = MemoryPlan {
            host: 8 << 20,
            ..MemoryPlan::default()
        };
        let keys = [
            (true, "optimizer.memory: host"),
            (false, "sft.activation_offloading: true"),
        ];
        let found = more_than_host(&plan, free_mib.map(|mib| mib << 20), &keys);
        assert_eq!(found.as_deref(), expected);
    }

    /// Peaks of 30, 20, 10 and 5 MiB.
    #[rstest]
    #[case::all_fit(30, "sharding: optimizer fits into 30 MiB (max_memory_mib)")]
    #[case::two_fit(20, "sharding: optimizer fits into 20 MiB (max_memory_mib)")]
    #[case::not_that_of_the_optimizer(19, "sharding: resident fits into 19 MiB (max_memory_mib)")]
    #[case::the_last_one_fits(9, "sharding: full fits into 9 MiB (max_memory_mib)")]
    #[case::none_fits(4, "no sharding fits into 4 MiB (max_memory_mib)")]
    fn ranks_divide_no_more_than_they_need_to_fit(#[case] mib: usize, #[case] expected: &str) {
        let plan = |sharding, mib: usize| {
            let weights = mib << 20;
            let plan = MemoryPlan::default();
            (sharding, MemoryPlan { weights, ..plan })
        };
        let mut plans = RankPlans {
            host_bytes: None,
            plans: vec![
                plan(Sharding::None, 30),
                plan(Sharding::Optimizer, 20),
                plan(Sharding::Resident, 10),
                plan(Sharding::Full, 5),
            ],
            budget: MemoryBudget::of(Some(mib), 8).unwrap(),
        };
        assert_eq!(plans.advice().unwrap(), expected);
        plans.plans.clear();
        assert_eq!(plans.advice(), None);
    }

    fn write(root: &Path, path: &str, text: &str) {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[test]
    fn free_memory_is_that_of_the_machine_or_of_a_control_group() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        assert_eq!(free_memory(root), None);
        write(
            root,
            "proc/meminfo",
            "MemTotal: 9000 kB\nMemAvailable:    8000 kB\n",
        );
        assert_eq!(free_memory(root), Some(8000 << 10));
        write(root, "proc/self/cgroup", "0::/jobs/one\n");
        write(root, "sys/fs/cgroup/jobs/one/memory.max", "max\n");
        write(root, "sys/fs/cgroup/jobs/one/memory.current", "4096\n");
        assert_eq!(free_memory(root), Some(8000 << 10));
        // The limit of the group above.
        write(root, "sys/fs/cgroup/jobs/memory.max", "1000000\n");
        write(root, "sys/fs/cgroup/jobs/memory.current", "300000\n");
        assert_eq!(free_memory(root), Some(700_000));
        write(
            root,
            "sys/fs/cgroup/jobs/memory.stat",
            "anon 1\ninactive_file 200000\n",
        );
        assert_eq!(free_memory(root), Some(900_000));
        // Its own limit, of which all is in use.
        write(root, "sys/fs/cgroup/jobs/one/memory.max", "4000\n");
        assert_eq!(free_memory(root), Some(0));
    }
}
