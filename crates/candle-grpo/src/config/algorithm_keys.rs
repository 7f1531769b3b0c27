//! The effect that each key in the algorithm section has on the run settings.

use candle_grpo_core::advantage::KlPenalty;
use candle_grpo_core::kl::KlController;
use candle_grpo_core::rewards::{NormLevel, RewardNorm};
use candle_grpo_core::selection::SampleFilter;
use candle_grpo_core::{AdvantagePipeline, Kl, KlEstimator, Scale, TokenAdvantage, validate};
use candle_grpo_loss::surrogate::{DetachedWeight, PositiveIf, SquaredLogRatio, Topr, UnifiedMask};
use candle_grpo_loss::{Clip, KlLoss, PolicyLoss, Recipe, Surrogate};
use candle_grpo_train::{CriticConfig, TrainConfig};

use super::algorithm::{AdvEstimator, AlgorithmConfig, PgVariant};
use super::preset::Preset;

/// A key in the algorithm section that is not valid.
#[derive(Debug)]
pub(super) struct KeyError {
    pub(super) key: &'static str,
    pub(super) message: String,
    /// True if the key is valid and has no effect.
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

/// Refuses each of these keys that is given, as it has no effect without what is `needed`.
macro_rules! reject {
    ($keys:ident, $needed:expr, $($key:ident),+) => {{
        $(reject_unless(stringify!($key), $keys.$key, false, $needed)?;)+
    }};
}

/// The absolute value that ROLL, verl and OpenRLHF clamp their KL estimates to.
const KL_CLAMP: f64 = 10.;
const PG_CLIP: f64 = 0.2;
const INIT_KL_COEF: f64 = 0.2;
const KL_HORIZON: f64 = 10_000.;
const KL_LOSS_COEF: f64 = 0.001;
const LAMBD: f64 = 0.95;
const CISPO_EPSILON: f64 = 0.1;

impl AlgorithmConfig {
    /// Lays the keys of this section, except `recipe`, over `config`.
    pub(super) fn apply(&self, config: &mut TrainConfig) -> Checked {
        set(&mut config.sampling.max_new_tokens, self.response_length);
        let response_length = config.sampling.max_new_tokens;
        config.recipe = match self.preset {
            Some(preset) => preset.recipe(response_length),
            None => Recipe::default(),
        };
        self.apply_estimator(config)?;
        self.apply_normalization(&mut config.recipe)?;
        self.apply_to_tokens(&mut config.recipe);
        self.apply_kl_penalty(config)?;
        self.apply_surrogate(&mut config.recipe.policy_loss)?;
        self.apply_loss(&mut config.recipe.policy_loss)?;
        self.apply_advantage(&mut config.recipe)?;
        self.apply_kl_coef(config)?;
        self.apply_filters(config, response_length)
    }

    fn apply_estimator(&self, config: &mut TrainConfig) -> Checked {
        let gae = self.adv_estimator == Some(AdvEstimator::Gae);
        // The estimator of the preset keeps its options.
        let of_preset = self.preset.and_then(Preset::estimator);
        if let Some(estimator) = self.estimator().filter(|_| self.estimator() != of_preset) {
            let tokens = TokenAdvantage {
                lambda: gae.then(|| self.lambd.unwrap_or(LAMBD)),
                ..TokenAdvantage::default()
            };
            config.recipe.advantage = match estimator {
                AdvEstimator::Grpo => AdvantagePipeline::grpo().then(tokens),
                AdvEstimator::Reinforce | AdvEstimator::Gae => tokens.into(),
            };
        }
        if gae {
            let mut critic = CriticConfig::default();
            critic.value_loss.clip = self.value_clip;
            config.critic = Some(critic);
            return Ok(());
        }
        reject!(self, "adv_estimator: gae", lambd, value_clip);
        Ok(())
    }

    /// Returns the estimator that the keys choose. A key that normalizes or clips rewards chooses
    /// ROLL's GRPO, since ROLL does that before it estimates advantages.
    fn estimator(&self) -> Option<AdvEstimator> {
        let implied = self.preset.is_none() && self.shapes_rewards();
        self.adv_estimator.or(implied.then_some(AdvEstimator::Grpo))
    }

    /// Returns whether a key normalizes or clips rewards.
    fn shapes_rewards(&self) -> bool {
        [
            self.reward_norm.is_some(),
            self.reward_shift == Some(true),
            self.reward_scale == Some(true),
            self.norm_mean_type.is_some(),
            self.norm_std_type.is_some(),
            self.reward_clip.is_some(),
        ]
        .contains(&true)
    }

    /// Sets reward normalization and clipping. In ROLL's GRPO both are in the sequence stage,
    /// unless their levels are not the group's.
    fn apply_normalization(&self, recipe: &mut Recipe) -> Checked {
        if !self.shapes_rewards() {
            return Ok(());
        }
        let is_roll = self.preset == Some(Preset::Roll);
        let is_grpo = match self.estimator() {
            Some(estimator) => estimator == AdvEstimator::Grpo,
            None => is_roll,
        };
        let mut pipeline = recipe.advantage.pipeline();
        let mut norm = match (is_grpo, &pipeline.sequence) {
            (true, Some(sequence)) => levels(NormLevel::Group, level(sequence.scale)),
            (true, None) => levels(NormLevel::Group, NormLevel::Group),
            (false, _) => recipe.reward_shaping.norm,
        };
        self.set_levels(&mut norm)?;
        if let Some(clip) = self.reward_clip {
            validate::positive("reward_clip", clip)
                .map_err(|e| wrong("reward_clip", format!("{}, must {}", e.value, e.must)))?;
        }
        let scale = match (norm.mean, norm.std) {
            (NormLevel::Group, NormLevel::Group) => Some(Scale::Group),
            (NormLevel::Group, NormLevel::Batch) => Some(Scale::Batch),
            (NormLevel::Group, NormLevel::None) => Some(Scale::None),
            _ => None,
        };
        let shaping = &mut recipe.reward_shaping;
        if is_grpo && let Some(sequence) = &mut pipeline.sequence {
            if let Some(scale) = scale {
                sequence.scale = scale;
                sequence.clip = self.reward_clip.map(|clip| [-clip, clip]).or(sequence.clip);
                recipe.advantage = pipeline;
                return Ok(());
            }
            shaping.clip_range = sequence.clip;
            pipeline.sequence = None;
            recipe.advantage = pipeline;
        }
        shaping.norm = norm;
        if self.reward_clip.is_some() {
            shaping.clip = self.reward_clip;
            shaping.clip_range = None;
        }
        Ok(())
    }

    fn set_levels(&self, norm: &mut RewardNorm) -> Checked {
        let (shift, scale) = (
            self.reward_shift == Some(true),
            self.reward_scale == Some(true),
        );
        if shift && scale {
            return Err(wrong(
                "reward_scale",
                "true, must be false with reward_shift: true, which does not divide",
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
            *norm = levels(level, level);
        }
        for (key, only, other) in [
            ("reward_shift", shift, &mut norm.std),
            ("reward_scale", scale, &mut norm.mean),
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
        set(&mut norm.mean, self.norm_mean_type);
        set(&mut norm.std, self.norm_std_type);
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
                reject!(self, on, kl_penalty, init_kl_coef, target_kl, kl_horizon);
                return Ok(());
            }
        }
        let estimator = self.kl_penalty.unwrap_or(KlEstimator::K1);
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
            None => reject_unless("kl_horizon", self.kl_horizon, false, "target_kl"),
        }
    }

    /// Rejects the keys of surrogates that `pg_variant` does not name.
    fn reject_other_surrogates(&self) -> Checked {
        use PgVariant::{Cispo, Kimi15, Tis, Topr as Topred};
        if self.pg_variant != Some(Tis) {
            reject!(self, "pg_variant: tis", tis_lower_bound, tis_upper_bound);
        }
        if self.pg_variant != Some(Topred) {
            let topr = "pg_variant: topr";
            reject!(self, topr, topr_positive_weight, topr_negative_weight);
        }
        if self.pg_variant != Some(Cispo) {
            let cispo = "pg_variant: cispo";
            reject!(
                self,
                cispo,
                cispo_epsilon_low,
                cispo_epsilon_high,
                cispo_use_unified_mask
            );
        }
        if self.pg_variant != Some(Kimi15) {
            reject!(self, "pg_variant: kimi15", kimi15_tau);
        }
        Ok(())
    }

    fn apply_surrogate(&self, loss: &mut PolicyLoss) -> Checked {
        use PgVariant::{Cispo, Kimi15, Ppo, Tis, Topr as Topred, Vanilla};
        self.reject_other_surrogates()?;
        let (low, high) = self.clip_range()?;
        match self.pg_variant {
            None => {}
            Some(Ppo) => loss.surrogate = Clip::symmetric(PG_CLIP).into(),
            Some(Vanilla) => loss.surrogate = Surrogate::PolicyGradient,
            Some(Tis) => {
                loss.surrogate = DetachedWeight {
                    ratio_min: Some(self.tis_lower_bound.unwrap_or(0.)),
                    ..DetachedWeight::at_most(self.tis_upper_bound.unwrap_or(1.))
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
                let low = self.cispo_epsilon_low.unwrap_or(CISPO_EPSILON);
                let high = self.cispo_epsilon_high.unwrap_or(CISPO_EPSILON);
                let mask = self.cispo_use_unified_mask == Some(true);
                loss.surrogate = DetachedWeight {
                    ratio_min: Some(1. - low),
                    unified_mask: mask.then_some(UnifiedMask { low, high }),
                    ..DetachedWeight::at_most(1. + high)
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
                let clip = "a loss that clips (pg_variant: ppo)";
                reject!(self, clip, pg_clip, pg_clip_low, pg_clip_high);
                let dual = self.dual_clip_loss.filter(|&on| on);
                reject_unless("dual_clip_loss", dual, false, clip)
            }
        }
    }

    /// Returns the clip widths on both sides, if keys set them.
    fn clip_range(&self) -> Result<(Option<f64>, Option<f64>), KeyError> {
        if self.use_pg_clip_range == Some(true) {
            let needed = "use_pg_clip_range: false, or dual_clip_loss";
            let dual = self.dual_clip_loss == Some(true);
            reject_unless("pg_clip", self.pg_clip, dual, needed)?;
            let low = self.pg_clip_low.unwrap_or(PG_CLIP);
            let high = self.pg_clip_high.unwrap_or(PG_CLIP);
            return Ok((Some(low), Some(high)));
        }
        if self.use_pg_clip_range.is_none() {
            let on = "use_pg_clip_range: true";
            reject!(self, on, pg_clip_low, pg_clip_high);
        }
        Ok((self.pg_clip, self.pg_clip))
    }

    fn apply_loss(&self, loss: &mut PolicyLoss) -> Checked {
        match self.use_kl_loss {
            Some(true) if loss.kl.is_none() => {
                loss.kl = Some(KlLoss::new(KL_LOSS_COEF, clamped(KlEstimator::K3)));
            }
            Some(false) => loss.kl = None,
            _ => {}
        }
        match (&mut loss.kl, self.use_kl_loss) {
            (Some(kl), _) => set(&mut kl.coef, self.kl_loss_coef),
            (None, None) => reject!(self, "use_kl_loss: true", kl_loss_coef),
            (None, Some(_)) => {}
        }
        set(&mut loss.entropy_coef, self.entropy_loss_coef);
        set(&mut loss.loss_coef, self.rl_loss_coef);
        set(&mut loss.importance_level, self.importance_sampling);
        set(&mut loss.aggregation, self.loss_agg_mode);
        Ok(())
    }

    /// Applies the keys that mean the same with every preset: the advantage's epsilon and scale.
    fn apply_advantage(&self, recipe: &mut Recipe) -> Checked {
        let mut pipeline = recipe.advantage.pipeline();
        let norm = &mut recipe.reward_shaping.norm;
        let is_normalized = norm.mean != NormLevel::None || norm.std != NormLevel::None;
        if let Some(epsilon) = self.advantage_epsilon {
            let mut used = norm.std != NormLevel::None;
            norm.epsilon = epsilon;
            if let Some(sequence) = &mut pipeline.sequence {
                sequence.epsilon = epsilon;
                used = true;
            }
            if let Some(tokens) = &mut pipeline.tokens {
                tokens.whitening.epsilon = epsilon;
                used |= tokens.whiten_advantages || tokens.whiten_rewards;
            }
            let divides = "an algorithm that divides by a deviation";
            reject_unless("advantage_epsilon", self.advantage_epsilon, used, divides)?;
        }
        if let Some(scale) = self.advantage_scale {
            match (&mut pipeline.sequence, scale) {
                (Some(sequence), scale) => sequence.scale = scale,
                (None, Scale::Group) if is_normalized => norm.std = NormLevel::Group,
                (None, Scale::Batch) if is_normalized => norm.std = NormLevel::Batch,
                (None, Scale::None) if is_normalized => norm.std = NormLevel::None,
                (None, Scale::GroupMean) if is_normalized => {
                    return Err(wrong(
                        "advantage_scale",
                        "group_mean, must be group, batch or none with rewards that are normalized first",
                    ));
                }
                _ => {
                    let normalizes =
                        "an algorithm that normalizes rewards or advantages of samples";
                    reject_unless("advantage_scale", Some(scale), false, normalizes)?;
                }
            }
        }
        if self.advantage_epsilon.is_some() || self.advantage_scale.is_some() {
            // The named advantage, if it has these options.
            let named = AdvantagePipeline {
                epsilon: self.advantage_epsilon.or(recipe.advantage.epsilon),
                scale: self.advantage_scale.or(recipe.advantage.scale),
                ..recipe.advantage.clone()
            };
            let is_same = named.validate().is_ok() && named.pipeline() == pipeline;
            recipe.advantage = if is_same { named } else { pipeline };
        }
        Ok(())
    }

    /// Applies the KL coefficient, wherever the algorithm has it.
    fn apply_kl_coef(&self, config: &mut TrainConfig) -> Checked {
        let Some(coef) = self.kl_coef else {
            return Ok(());
        };
        for (key, given) in [
            ("kl_loss_coef", self.kl_loss_coef),
            ("init_kl_coef", self.init_kl_coef),
        ] {
            if given.is_some() {
                return Err(wrong(
                    key,
                    "given together with kl_coef, must be one of them",
                ));
            }
        }
        let is_on = coef != 0.;
        let mut pipeline = config.recipe.advantage.pipeline();
        let AdvantagePipeline {
            sequence, tokens, ..
        } = &mut pipeline;
        let sequence_kl = sequence.iter_mut().flat_map(|stage| &mut stage.kl_penalty);
        let token_kl = tokens.iter_mut().flat_map(|stage| &mut stage.kl_penalty);
        let mut in_rewards = false;
        for penalty in sequence_kl.chain(token_kl) {
            penalty.coef = coef;
            in_rewards = true;
        }
        if in_rewards {
            config.recipe.advantage = pipeline;
        }
        let loss = &mut config.recipe.policy_loss.kl;
        match loss {
            Some(kl) => kl.coef = coef,
            None if !in_rewards => *loss = Some(KlLoss::new(coef, self.estimate())),
            None => {}
        }
        if !is_on {
            *loss = None;
        }
        if let Some(KlController::Adaptive { coef: start, .. }) = &mut config.reward_kl {
            *start = coef;
        }
        Ok(())
    }

    /// Returns the KL estimate that `kl_coef` adds: k3, bounded if the preset's trainer bounds it.
    fn estimate(&self) -> Kl {
        match self.preset {
            Some(Preset::Verl | Preset::Roll | Preset::Openrlhf) => clamped(KlEstimator::K3),
            _ => Kl::new(KlEstimator::K3),
        }
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
                reject!(
                    self,
                    on,
                    difficulty_low_threshold,
                    difficulty_high_threshold
                );
            }
        }
        match self.error_max_len_clip {
            Some(true) => config.sample_filters.push(SampleFilter::ShortErrors {
                length: self.error_max_len_threshold.unwrap_or(response_length),
            }),
            Some(false) => {}
            None => reject!(self, "error_max_len_clip: true", error_max_len_threshold),
        }
        Ok(())
    }
}

fn set<T>(field: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *field = value;
    }
}

/// Refuses a key that is given and has no effect, as the condition that it needs is not `met`.
fn reject_unless<T>(key: &'static str, value: Option<T>, met: bool, needed: &str) -> Checked {
    if value.is_some() && !met {
        return Err(KeyError {
            idle: true,
            ..wrong(key, format!("given, but has no effect without {needed}"))
        });
    }
    Ok(())
}

fn levels(mean: NormLevel, std: NormLevel) -> RewardNorm {
    RewardNorm {
        mean,
        std,
        ..RewardNorm::default()
    }
}

/// Returns the level of the standard deviation that divides an advantage.
fn level(scale: Scale) -> NormLevel {
    match scale {
        Scale::Group | Scale::GroupMean => NormLevel::Group,
        Scale::Batch => NormLevel::Batch,
        Scale::None => NormLevel::None,
    }
}

fn clamped(estimator: KlEstimator) -> Kl {
    Kl {
        value_clamp: Some(KL_CLAMP),
        ..Kl::new(estimator)
    }
}

/// Changes the advantage's token stage, and adds one if there is none.
fn map_tokens(recipe: &mut Recipe, change: impl FnOnce(&mut TokenAdvantage)) {
    let mut pipeline = recipe.advantage.pipeline();
    change(pipeline.tokens.get_or_insert_with(TokenAdvantage::default));
    recipe.advantage = pipeline;
}
