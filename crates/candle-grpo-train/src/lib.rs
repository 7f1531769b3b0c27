//! Sampler, rewards, actor and training loop for candle-grpo.
//!
//! The way of the data, each arrow a type or function that can be used alone:
//!
//! ```text
//! Prompt ──Sampler──▶ Rollout ──RewardFunction──▶ rewards ──────Recipe──────▶ advantages
//!                        │                                                       │
//!                        └──────────▶ TokenBatch ──▶ TrainingBatch ◀─────────────┘
//!                                                        │
//!                          Actor::forward_backward ◀─────┘
//!                          Actor::clip_grad_and_step
//! ```
//!
//! [`Trainer`] is that way from left to right, [`RunDir`] the folder in which a run leaves what is to be kept, and
//! [`pretrain`] a warm-up on examples. [`Pretrained`] is a model that somebody else has trained, from a GGUF file or a
//! Hugging Face folder, with its tokenizer and its [`ChatTemplate`].

mod actor;
mod atomic_file;
mod batch;
mod character_tokenizer;
mod chat_template;
mod checkpoints;
mod checksums;
mod critic;
mod dataset;
mod draw;
mod evaluate;
mod format_reward;
mod gguf_tokenizer;
mod json_lines;
mod learning;
mod not_finite;
mod padding;
mod plot;
mod pretrain;
mod pretrained;
mod prompt;
mod reference;
mod requirements;
mod response;
mod reward;
mod rewards;
mod rollout;
mod run_dir;
mod sampler;
mod schedule;
mod scored;
mod shuffle;
mod special_tokens;
mod step_metrics;
mod stop_strings;
mod tensorboard;
mod tokenizer_json;
mod train_config;
mod trainer;
mod trainer_state;
mod truncation;
mod watch;

pub use actor::{Actor, ActorConfig, ComputeDType, StepStats};
pub use batch::{TokenBatch, TrainingBatch, prompt_tokens_to_host, sampler_log_probs};
pub use character_tokenizer::character_tokenizer;
pub use chat_template::{Chat, ChatTemplate, EncodedChat, RenderedChat};
pub use checkpoints::{Checkpoints, LatestCheckpoint, StepCheckpoint};
pub use critic::{Critic, CriticConfig, explained_variance};
pub use dataset::{Dataset, DatasetConfig, Question, Row, Template, read_rows};
pub use evaluate::{EvaluatedSample, Evaluation, evaluate};
pub use format_reward::{RegexReward, TagsReward};
pub use json_lines::read_json_lines;
pub use not_finite::NotFinite;
pub use plot::training_plot_svg;
pub use pretrain::{Example, PretrainConfig, pretrain};
pub use pretrained::Pretrained;
pub use prompt::Prompt;
pub use reference::{Reference, ReferenceRefresh};
pub use reward::{RewardFunction, Sample, WeightedRewards};
pub use rewards::{
    AnswerPlace, EnsembleOptions, EnsembleReward, ExactReward, JsonReward, LengthReward,
    NumericReward, ProgramConfig, ProgramReward, RegexOptions, RepetitionReward, RewardConfig,
    RewardKind, TagsOptions,
};
pub use rollout::{FinishReason, Rollout};
pub use run_dir::{RunDir, RunLock};
pub use sampler::{Sampler, SamplingConfig};
pub use schedule::LearningRateSchedule;
pub use shuffle::ShuffledOrder;
pub use special_tokens::{SpecialToken, SpecialTokens};
pub use step_metrics::{PhaseSeconds, StepMetrics};
pub use tensorboard::EventFile;
pub use train_config::{OldLogProbs, TrainConfig};
pub use trainer::Trainer;
pub use trainer_state::TrainerState;
pub use watch::{Interrupted, Phase, Unwatched, Watch};
