//! What the policy losses promise.

mod bad_input;
mod documentation;
mod fixture;
mod full_kl;
mod gradients;
mod linear_policy_loss;
mod log_prob;
mod masks;
mod micro_batches;
mod presets;
mod published_values;
mod recipes;
mod step_wide;

/// The other tests run on every device there is; this one says which.
#[test]
#[cfg_attr(not(feature = "cuda"), ignore = "built without the feature cuda")]
fn cuda_is_present_or_skipped() -> std::io::Result<()> {
    candle_grpo_test_support::say_whether_on_cuda()
}
