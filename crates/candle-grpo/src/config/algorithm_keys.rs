//! What the keys of the algorithm section do to the settings of a run.

use candle_grpo_core::{
    AdvantageConfig, AdvantagePipeline, Kl, KlController, KlEstimator, KlPenalty, NormLevel,
    RewardNorm, RewardShaping, SampleFilter, TokenAdvantage,
};
use candle_grpo_loss::{
    Aggregation, Clip, DetachedWeight, ImportanceLevel, KlLoss, PolicyLoss, PositiveIf, Recipe,
    SquaredLogRatio, Surrogate, Topr, UnifiedMask,
};
use candle_grpo_train::{CriticConfig, TrainConfig};

use super::algorithm::{
    AdvEstimator, AlgorithmConfig, ImportanceSampling, KlPenaltyName, LossAggMode, PgVariant,
};

/// What is wrong with a key of the algorithm section.
#[derive(Debug)]
pub(super) struct KeyError {
    pub(super) key: &'static str,
    pub(super) message: String,
    /// Whether the key would only change nothing.
    pub(super) idle: bool,
}

type Checked = Result<(), KeyError>;

fn wrong(key: &'static str, message: impl Into<String>) -> KeyError {
    KeyError {
        key,
        message: message.into(),
        idle: false,
    }
}

/// ROLL clamps its KL estimates to this.
const KL_CLAMP: f64 = 10.;
const PG_CLIP: f64 = 0.2;
const INIT_KL_COEF: f64 = 0.2;
const KL_HORIZON: f64 = 10_000.;
const KL_LOSS_COEF: f64 = 0.001;
const LAMBD: f64 = 0.95;
const CISPO_EPSILON: f64 = 0.1;

impl AlgorithmConfig {
    /// The settings of a run with the keys of this section, but for `recipe`, laid over `config`.
    pub(super) fn apply(&self, config: &mut TrainConfig) -> Checked {
        set(&mut config.prompts_per_step, self.rollout_batch_size);
        set(
            &mut config.num_generations,
            self.num_return_sequences_in_group,
        );
        set(&mut config.sampling.max_new_tokens, self.response_length);
        set(&mut config.epochs, self.ppo_epochs);
        let response_length = config.sampling.max_new_tokens;
        config.recipe = match self.preset {
            Some(preset) => preset.recipe(response_length),
            None => plain(),
        };
        self.apply_estimator(config)?;
        self.apply_normalisation(&mut config.recipe.reward_shaping)?;
        if self.reward_clip.is_some() {
            config.recipe.reward_shaping.clip = self.reward_clip;
            config.recipe.reward_shaping.clip_range = None;
        }
        self.apply_to_tokens(&mut config.recipe);
        self.apply_kl_penalty(config)?;
        self.apply_surrogate(&mut config.recipe.policy_loss)?;
        self.apply_loss(&mut config.recipe.policy_loss, response_length)?;
        self.apply_filters(config, response_length)
    }

    fn apply_estimator(&self, config: &mut TrainConfig) -> Checked {
        let gae = self.adv_estimator == Some(AdvEstimator::Gae);
        if let Some(estimator) = self.adv_estimator {
            config.recipe.advantage = of_tokens(TokenAdvantage {
                lambda: gae.then(|| self.lambd.unwrap_or(LAMBD)),
                ..TokenAdvantage::default()
            });
            config.recipe.reward_shaping.norm = match estimator {
                AdvEstimator::Grpo => norm(NormLevel::Group, NormLevel::Group),
                _ => RewardNorm::default(),
            };
        }
        if gae {
            let mut critic = CriticConfig::default();
            critic.value_loss.clip = self.value_clip;
            config.critic = Some(critic);
            return Ok(());
        }
        needs("lambd", self.lambd, false, "adv_estimator: gae")?;
        needs("value_clip", self.value_clip, false, "adv_estimator: gae")
    }

    fn apply_normalisation(&self, shaping: &mut RewardShaping) -> Checked {
        let (shift, scale) = (
            self.reward_shift == Some(true),
            self.reward_scale == Some(true),
        );
        if shift && scale {
            return Err(wrong(
                "reward_scale",
                "true, must be false with reward_shift: true: one only subtracts the mean, the other only divides by the deviation",
            ));
        }
        for (key, level) in [
            ("norm_mean_type", self.norm_mean_type),
            ("norm_std_type", self.norm_std_type),
        ] {
            if level.is_some() && (self.reward_norm.is_some() || shift || scale) {
                return Err(wrong(
                    key,
                    "given together with reward_norm, reward_shift or reward_scale, must be one or the other",
                ));
            }
        }
        if let Some(level) = self.reward_norm {
            shaping.norm = norm(level, level);
        }
        for (key, only, other) in [
            ("reward_shift", shift, &mut shaping.norm.std),
            ("reward_scale", scale, &mut shaping.norm.mean),
        ] {
            if only && *other == NormLevel::None {
                return Err(wrong(
                    key,
                    "true, needs reward_norm: batch, group or running",
                ));
            }
            if only {
                *other = NormLevel::None;
            }
        }
        set(&mut shaping.norm.mean, self.norm_mean_type);
        set(&mut shaping.norm.std, self.norm_std_type);
        Ok(())
    }

    fn apply_to_tokens(&self, recipe: &mut Recipe) {
        let there = recipe.advantage.pipeline().tokens.is_some();
        let keys = [
            self.gamma.is_some(),
            self.whiten_rewards.is_some_and(|on| on || there),
            self.whiten_advantages.is_some_and(|on| on || there),
            self.advantage_clip.is_some(),
        ];
        if keys.contains(&true) {
            map_tokens(recipe, |tokens| {
                set(&mut tokens.gamma, self.gamma);
                set(&mut tokens.whiten_rewards, self.whiten_rewards);
                set(&mut tokens.whiten_advantages, self.whiten_advantages);
                if self.advantage_clip.is_some() {
                    tokens.advantage_clip = self.advantage_clip;
                }
            });
        }
    }

    fn apply_kl_penalty(&self, config: &mut TrainConfig) -> Checked {
        match self.add_token_level_kl {
            Some(true) => {}
            Some(false) => {
                if config.recipe.advantage.pipeline().tokens.is_some() {
                    map_tokens(&mut config.recipe, |tokens| tokens.kl_penalty = None);
                }
                return Ok(());
            }
            None => {
                let on = "add_token_level_kl: true";
                needs("kl_penalty", self.kl_penalty, false, on)?;
                needs("init_kl_coef", self.init_kl_coef, false, on)?;
                needs("target_kl", self.target_kl, false, on)?;
                return needs("kl_horizon", self.kl_horizon, false, on);
            }
        }
        let estimator = match self.kl_penalty.unwrap_or(KlPenaltyName::Kl) {
            KlPenaltyName::Kl => KlEstimator::K1,
            KlPenaltyName::Abs => KlEstimator::Abs,
            KlPenaltyName::Mse => KlEstimator::K2,
        };
        let coef = self.init_kl_coef.unwrap_or(INIT_KL_COEF);
        map_tokens(&mut config.recipe, |tokens| {
            tokens.kl_penalty = Some(KlPenalty {
                coef,
                kl: clamped(estimator),
            });
            tokens.token_reward_clip = self.reward_clip;
        });
        match self.target_kl {
            Some(target) => {
                config.reward_kl = Some(KlController::Adaptive {
                    coef,
                    target,
                    horizon: self.kl_horizon.unwrap_or(KL_HORIZON),
                });
                Ok(())
            }
            None => needs("kl_horizon", self.kl_horizon, false, "target_kl"),
        }
    }

    fn apply_surrogate(&self, loss: &mut PolicyLoss) -> Checked {
        use PgVariant::{Cispo, Kimi15, Ppo, Tis, Topr as Topred, Vanilla};
        let of = |variant: PgVariant| self.pg_variant == Some(variant);
        let weight = "pg_variant: tis";
        needs("tis_lower_bound", self.tis_lower_bound, of(Tis), weight)?;
        needs("tis_upper_bound", self.tis_upper_bound, of(Tis), weight)?;
        let topr = "pg_variant: topr";
        needs(
            "topr_positive_weight",
            self.topr_positive_weight,
            of(Topred),
            topr,
        )?;
        needs(
            "topr_negative_weight",
            self.topr_negative_weight,
            of(Topred),
            topr,
        )?;
        let cispo = "pg_variant: cispo";
        needs(
            "cispo_epsilon_low",
            self.cispo_epsilon_low,
            of(Cispo),
            cispo,
        )?;
        needs(
            "cispo_epsilon_high",
            self.cispo_epsilon_high,
            of(Cispo),
            cispo,
        )?;
        needs(
            "cispo_use_unified_mask",
            self.cispo_use_unified_mask,
            of(Cispo),
            cispo,
        )?;
        needs(
            "kimi15_tau",
            self.kimi15_tau,
            of(Kimi15),
            "pg_variant: kimi15",
        )?;

        let (low, high) = self.clip_range()?;
        match self.pg_variant {
            None => {}
            Some(Ppo) => loss.surrogate = Clip::symmetric(PG_CLIP).into(),
            Some(Vanilla) => loss.surrogate = Surrogate::PolicyGradient,
            Some(Tis) => {
                loss.surrogate = DetachedWeight {
                    ratio_min: Some(self.tis_lower_bound.unwrap_or(0.)),
                    ratio_max: Some(self.tis_upper_bound.unwrap_or(1.)),
                    unified_mask: None,
                }
                .into();
            }
            Some(Topred) => {
                loss.surrogate = Topr {
                    positive_weight: self.topr_positive_weight.unwrap_or(1.),
                    negative_weight: self.topr_negative_weight.unwrap_or(1.),
                    positive_if: PositiveIf::ScoreAbove(0.),
                }
                .into();
            }
            Some(Cispo) => {
                let mask = self.cispo_use_unified_mask == Some(true);
                loss.surrogate = DetachedWeight {
                    ratio_min: Some(1. - self.cispo_epsilon_low.unwrap_or(CISPO_EPSILON)),
                    ratio_max: Some(1. + self.cispo_epsilon_high.unwrap_or(CISPO_EPSILON)),
                    unified_mask: mask.then(|| UnifiedMask {
                        low: low.unwrap_or(PG_CLIP),
                        high: high.unwrap_or(PG_CLIP),
                    }),
                }
                .into();
            }
            Some(Kimi15) => {
                loss.surrogate = SquaredLogRatio {
                    coef: self.kimi15_tau.unwrap_or(0.1),
                }
                .into();
            }
        }
        match &mut loss.surrogate {
            Surrogate::Clip(clip) => {
                set(&mut clip.low, low);
                set(&mut clip.high, high);
                match self.dual_clip_loss {
                    Some(true) => clip.dual_clip = Some(1. + 2. * self.pg_clip.unwrap_or(PG_CLIP)),
                    Some(false) => clip.dual_clip = None,
                    None => {}
                }
                Ok(())
            }
            _ => {
                let masked = of(Cispo) && self.cispo_use_unified_mask == Some(true);
                let clip = "a loss that clips (pg_variant: ppo)";
                needs("pg_clip", self.pg_clip, masked, clip)?;
                needs("pg_clip_low", self.pg_clip_low, masked, clip)?;
                needs("pg_clip_high", self.pg_clip_high, masked, clip)?;
                let dual = self.dual_clip_loss.filter(|&on| on);
                needs("dual_clip_loss", dual, false, clip)
            }
        }
    }

    /// How far the ratio may go from 1 on each side, if keys say so.
    fn clip_range(&self) -> Result<(Option<f64>, Option<f64>), KeyError> {
        if self.use_pg_clip_range == Some(true) {
            let low = self.pg_clip_low.unwrap_or(PG_CLIP);
            let high = self.pg_clip_high.unwrap_or(PG_CLIP);
            return Ok((Some(low), Some(high)));
        }
        if self.use_pg_clip_range.is_none() {
            let on = "use_pg_clip_range: true";
            needs("pg_clip_low", self.pg_clip_low, false, on)?;
            needs("pg_clip_high", self.pg_clip_high, false, on)?;
        }
        Ok((self.pg_clip, self.pg_clip))
    }

    fn apply_loss(&self, loss: &mut PolicyLoss, response_length: usize) -> Checked {
        match self.use_kl_loss {
            Some(true) if loss.kl.is_none() => {
                loss.kl = Some(KlLoss::new(KL_LOSS_COEF, clamped(KlEstimator::K3)));
            }
            Some(false) => loss.kl = None,
            _ => {}
        }
        match (&mut loss.kl, self.use_kl_loss) {
            (Some(kl), _) => set(&mut kl.coef, self.kl_loss_coef),
            (None, None) => needs(
                "kl_loss_coef",
                self.kl_loss_coef,
                false,
                "use_kl_loss: true",
            )?,
            (None, Some(_)) => {}
        }
        set(&mut loss.entropy_coef, self.entropy_loss_coef);
        set(&mut loss.loss_coef, self.rl_loss_coef);
        match self.importance_sampling {
            Some(ImportanceSampling::Token) => loss.importance_level = ImportanceLevel::Token,
            Some(ImportanceSampling::Seq) => loss.importance_level = ImportanceLevel::Sequence,
            None => {}
        }
        if let Some(mode) = self.loss_agg_mode {
            loss.aggregation = match mode {
                LossAggMode::TokenMean => Aggregation::TokenMean,
                LossAggMode::SeqMeanTokenSum => Aggregation::SeqMeanTokenSum,
                LossAggMode::SeqMeanTokenMean => Aggregation::SeqMeanTokenMean,
                LossAggMode::SeqMeanTokenSumNorm => Aggregation::SeqMeanTokenSumNorm {
                    length: response_length as f64,
                },
            };
        }
        Ok(())
    }

    fn apply_filters(&self, config: &mut TrainConfig, response_length: usize) -> Checked {
        if self.max_len_mask == Some(true) {
            config.sample_filters.push(SampleFilter::ShorterThan {
                length: response_length,
            });
        }
        match self.difficulty_mask {
            Some(true) => config.sample_filters.push(SampleFilter::Difficulty {
                low: self.difficulty_low_threshold.unwrap_or(0.),
                high: self.difficulty_high_threshold.unwrap_or(1.),
            }),
            Some(false) => {}
            None => {
                let on = "difficulty_mask: true";
                needs(
                    "difficulty_low_threshold",
                    self.difficulty_low_threshold,
                    false,
                    on,
                )?;
                needs(
                    "difficulty_high_threshold",
                    self.difficulty_high_threshold,
                    false,
                    on,
                )?;
            }
        }
        match self.error_max_len_clip {
            Some(true) => config.sample_filters.push(SampleFilter::ShortErrors {
                length: self.error_max_len_threshold.unwrap_or(response_length),
            }),
            Some(false) => {}
            None => {
                let threshold = self.error_max_len_threshold;
                needs(
                    "error_max_len_threshold",
                    threshold,
                    false,
                    "error_max_len_clip: true",
                )?;
            }
        }
        Ok(())
    }
}

fn set<T>(field: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *field = value;
    }
}

/// Errs if a key is given that would change nothing, since another is not what it `needs`.
fn needs<T>(key: &'static str, value: Option<T>, met: bool, needed: &str) -> Checked {
    if value.is_some() && !met {
        return Err(KeyError {
            idle: true,
            ..wrong(key, format!("given, but changes nothing without {needed}"))
        });
    }
    Ok(())
}

/// GRPO as ROLL has it where nothing else is said.
fn plain() -> Recipe {
    Recipe {
        reward_shaping: RewardShaping {
            norm: norm(NormLevel::Group, NormLevel::Group),
            ..RewardShaping::default()
        },
        advantage: of_tokens(TokenAdvantage::default()),
        policy_loss: PolicyLoss {
            aggregation: Aggregation::SeqMeanTokenMean,
            ..PolicyLoss::default()
        },
        ..Recipe::default()
    }
}

fn norm(mean: NormLevel, std: NormLevel) -> RewardNorm {
    RewardNorm {
        mean,
        std,
        ..RewardNorm::default()
    }
}

fn clamped(estimator: KlEstimator) -> Kl {
    Kl {
        value_clamp: Some(KL_CLAMP),
        ..Kl::new(estimator)
    }
}

fn of_tokens(tokens: TokenAdvantage) -> AdvantageConfig {
    AdvantagePipeline::from(tokens).into()
}

/// Changes the stage of tokens of the advantage, which gets one if it has none.
fn map_tokens(recipe: &mut Recipe, change: impl FnOnce(&mut TokenAdvantage)) {
    let mut pipeline = recipe.advantage.pipeline();
    change(pipeline.tokens.get_or_insert_with(TokenAdvantage::default));
    recipe.advantage = pipeline.into();
}
