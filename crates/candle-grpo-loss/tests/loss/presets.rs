//! Published losses: each is valid, differentiable and unchanged by a configuration file.

use candle_core::Result;
use candle_grpo_loss::surrogate::Divergence;
use candle_grpo_loss::{Aggregation, Clip, PolicyLoss, Surrogate, experimental};
use candle_grpo_test_support::devices;
use rstest::rstest;

use crate::fixture::Fixture;

pub(crate) fn presets() -> Vec<(&'static str, PolicyLoss)> {
    vec![
        ("grpo", PolicyLoss::grpo()),
        ("dapo", PolicyLoss::dapo()),
        ("bnpo", PolicyLoss::bnpo()),
        ("dr_grpo", PolicyLoss::dr_grpo(128.)),
        ("gspo", PolicyLoss::gspo()),
        ("gspo_token", PolicyLoss::gspo_token()),
        ("luspo", experimental::policy_loss::luspo()),
        ("gmpo", PolicyLoss::gmpo()),
        ("cispo", PolicyLoss::cispo()),
        ("tis", PolicyLoss::tis()),
        ("topr", PolicyLoss::topr()),
        ("sapo", PolicyLoss::sapo()),
        ("vespo", experimental::policy_loss::vespo()),
        ("gpg", PolicyLoss::gpg()),
        ("rloo", PolicyLoss::rloo()),
        ("reinforce_plus_plus", PolicyLoss::reinforce_plus_plus()),
        ("kimi_k1_5", PolicyLoss::kimi_k1_5()),
        ("dro", PolicyLoss::dro(0.1)),
        ("dppo", PolicyLoss::dppo(Divergence::TotalVariation)),
        ("clip_cov", PolicyLoss::clip_cov()),
        ("kl_cov", PolicyLoss::kl_cov()),
        ("deepseek_v3_2", PolicyLoss::deepseek_v3_2(0.01, 0.5)),
        ("prime_rl", PolicyLoss::prime_rl()),
        ("ipo", PolicyLoss::ipo(0.1)),
        ("fipo", experimental::policy_loss::fipo()),
        ("m2po", experimental::policy_loss::m2po()),
        ("real", experimental::policy_loss::real()),
        ("likelihood", PolicyLoss::likelihood()),
        (
            "on_policy_distillation",
            PolicyLoss::on_policy_distillation(),
        ),
        ("verl", PolicyLoss::verl()),
        ("roll", PolicyLoss::roll()),
        ("twinkle", PolicyLoss::twinkle()),
    ]
}

#[test]
fn each_preset_is_valid_and_gives_a_gradient() -> Result<()> {
    for device in devices() {
        let fixture = Fixture::new(device);
        for (name, preset) in presets() {
            preset.validate()?;
            // These need other inputs, and have their own tests.
            if ["m2po", "real"].contains(&name) {
                continue;
            }
            let computed = fixture.compute(&preset)?;
            assert!(computed.loss.is_finite(), "{name}");
            assert!(computed.log_probs.iter().any(|g| *g != 0.), "{name}");
        }
    }
    Ok(())
}

/// One default: clip 0.2, sequence means and no KL.
#[test]
fn the_default_loss_is_grpo() {
    assert_eq!(PolicyLoss::default(), PolicyLoss::grpo());
    let grpo = PolicyLoss::grpo();
    assert_eq!(grpo.surrogate, Clip::symmetric(0.2).into());
    assert_eq!(grpo.aggregation, Aggregation::SeqMeanTokenMean);
    assert_eq!(grpo.kl, None);
}

#[test]
fn each_preset_survives_serde() -> Result<()> {
    for (name, preset) in presets() {
        let text = serde_json::to_string(&preset).map_err(candle_core::Error::wrap)?;
        let read: PolicyLoss = serde_json::from_str(&text).map_err(candle_core::Error::wrap)?;
        assert_eq!(read, preset, "{name}: {text}");
    }
    Ok(())
}

#[rstest]
#[case("cispo", PolicyLoss::cispo())]
#[case("sapo", PolicyLoss::sapo())]
#[case("gmpo", PolicyLoss::gmpo())]
fn a_surrogate_may_have_the_name_of_its_paper(
    #[case] name: &str,
    #[case] preset: PolicyLoss,
) -> Result<()> {
    let text = format!(r#"{{"{name}": {{}}}}"#);
    let read: Surrogate = serde_json::from_str(&text).map_err(candle_core::Error::wrap)?;
    assert_eq!(read, preset.surrogate);
    Ok(())
}

#[rstest]
#[case(r#"{"surrogat": "policy_gradient"}"#, "unknown field `surrogat`")]
#[case(r#"{"surrogate": {"clip": {"hihg": 0.3}}}"#, "unknown field `hihg`")]
#[case(r#"{"aggregation": "token-maen"}"#, "unknown variant `token-maen`")]
#[case(r#"{"kl": {"coeff": 0.1}}"#, "unknown field `coeff`")]
#[case(
    r#"{"rollout_correction": {"weights": null}}"#,
    "unknown field `weights`"
)]
fn an_unknown_key_is_an_error(#[case] text: &str, #[case] expected: &str) {
    let error = serde_json::from_str::<PolicyLoss>(text).expect_err("an unknown key");
    assert!(error.to_string().contains(expected), "{error}");
}
