//! Routing to experts, and its replay.

use candle_core::{DType, Result, Tensor, Var};
use candle_grpo_nn::model::{Router, RouterPass, Routing};
use candle_grpo_test_support::{device, noise_tensor};
use rstest::rstest;

const TOKENS: usize = 5;
const EXPERTS: usize = 6;

fn logits(seed: u64) -> Result<Tensor> {
    noise_tensor((TOKENS, EXPERTS), seed, DType::F64, device())? * 2.
}

/// Each token's output if expert e outputs `(e + 1)^2`.
fn mixed(routing: &Routing) -> Result<Tensor> {
    let outputs = (routing.experts.to_dtype(DType::F64)? + 1.)?.sqr()?;
    (&routing.gates * outputs)?.sum(1)
}

#[rstest]
fn the_largest_logits_are_chosen_in_their_order(#[values(1, 3, 6)] top_k: usize) -> Result<()> {
    let logits = logits(1)?;
    let experts = Router::new(top_k)
        .route(&logits)?
        .experts
        .to_vec2::<u32>()?;
    for (row, chosen) in logits.to_vec2::<f64>()?.iter().zip(experts) {
        let mut order: Vec<u32> = (0..EXPERTS as u32).collect();
        order.sort_by(|&a, &b| row[b as usize].total_cmp(&row[a as usize]));
        assert_eq!(chosen, order[..top_k]);
    }
    Ok(())
}

#[test]
fn gates_are_a_softmax_over_the_chosen_or_over_all() -> Result<()> {
    let logits = Tensor::new(&[[0f64, 1., 2., 3.]], device())?;
    let e = std::f64::consts::E;
    let close = |found: &Tensor, expected: [f64; 2]| -> Result<()> {
        for (x, y) in found.to_vec2::<f64>()?[0].iter().zip(expected) {
            assert!((x - y).abs() < 1e-12, "{x} {y}");
        }
        Ok(())
    };
    close(
        &Router::new(2).route(&logits)?.gates,
        [e / (1. + e), 1. / (1. + e)],
    )?;
    let all = 1. + e + e * e + e * e * e;
    let routing = Router::over_all_experts(2).route(&logits)?;
    close(&routing.gates, [e * e * e / all, e * e / all])?;
    // Half types are exponentiated in f32.
    let routing = Router::new(2).route(&logits.to_dtype(DType::BF16)?)?;
    assert_eq!(routing.gates.dtype(), DType::F32);
    Ok(())
}

#[test]
fn a_replay_keeps_the_experts_though_the_logits_changed() -> Result<()> {
    let router = Router::new(2);
    let drawn = router.route(&logits(1)?)?;
    let moved = logits(2)?;
    let now = router.replay(&moved, &drawn.experts)?;
    let own = router.route(&moved)?;
    let experts = |routing: &Routing| routing.experts.to_vec2::<u32>();
    assert_eq!(experts(&now)?, experts(&drawn)?);
    assert_ne!(experts(&own)?, experts(&drawn)?);
    // The gates are current.
    assert_ne!(now.gates.to_vec2::<f64>()?, drawn.gates.to_vec2::<f64>()?);
    // Replaying what would be chosen anyway changes nothing.
    let same = router.replay(&moved, &own.experts)?;
    assert_eq!(same.gates.to_vec2::<f64>()?, own.gates.to_vec2::<f64>()?);
    Ok(())
}

#[rstest]
fn gradients_reach_the_current_logits(
    #[values(Router::new(2), Router::over_all_experts(3))] router: Router,
) -> Result<()> {
    let experts = router.route(&logits(1)?)?.experts;
    let logits = Var::from_tensor(&logits(2)?)?;
    let loss =
        |x: &Tensor| -> Result<Tensor> { mixed(&router.replay(x, &experts)?)?.sqr()?.sum_all() };
    let store = loss(&logits)?.backward()?;
    let gradient = store.get(&logits).expect("the logits get a gradient");
    let gradient = gradient.flatten_all()?.to_vec1::<f64>()?;
    let values = logits.flatten_all()?.to_vec1::<f64>()?;
    let step = 1e-6;
    for at in 0..values.len() {
        let moved = |by: f64| -> Result<f64> {
            let mut values = values.clone();
            values[at] += by;
            let x = Tensor::from_vec(values, (TOKENS, EXPERTS), device())?;
            loss(&x)?.to_scalar::<f64>()
        };
        let expected = (moved(step)? - moved(-step)?) / (2. * step);
        assert!(
            (gradient[at] - expected).abs() < 1e-4 + 1e-6 * expected.abs(),
            "{at}: {} {expected}",
            gradient[at]
        );
    }
    assert!(gradient.iter().any(|g| g.abs() > 0.1));
    Ok(())
}

#[test]
fn a_pass_over_layers_is_replayed_layer_by_layer() -> Result<()> {
    let router = Router::new(2);
    let layers = [logits(1)?, logits(3)?, logits(4)?];
    let mut recording = RouterPass::recording();
    for logits in &layers {
        recording.route(&router, logits)?;
    }
    let experts = recording.into_experts();
    let mut replaying = RouterPass::replaying(experts.clone());
    for expected in &experts {
        // A router that would choose differently.
        let found = replaying.route(&router, &logits(5)?)?.experts;
        assert_eq!(found.to_vec2::<u32>()?, expected.to_vec2::<u32>()?);
    }
    let error = replaying
        .route(&router, &layers[0])
        .unwrap_err()
        .to_string();
    assert!(error.contains("layer: 3, must be below 3"), "{error}");
    Ok(())
}

#[test]
fn wrong_shapes_are_refused_by_name() -> Result<()> {
    let logits = logits(6)?;
    for router in [Router::new(0), Router::new(7)] {
        let error = router.route(&logits).unwrap_err().to_string();
        assert!(
            error.starts_with("logits: [5, 6]") && error.contains("top_k"),
            "{error}"
        );
    }
    let router = Router::new(2);
    for bad in [logits.flatten_all()?, logits.to_dtype(DType::U32)?] {
        let error = router.route(&bad).unwrap_err().to_string();
        assert!(error.starts_with("logits: "), "{error}");
    }
    let experts = router.route(&logits)?.experts;
    for bad in [experts.narrow(0, 0, 3)?, experts.to_dtype(DType::I64)?] {
        let error = router.replay(&logits, &bad).unwrap_err().to_string();
        assert!(error.starts_with("experts: "), "{error}");
    }
    // Indices are checked on the CPU only.
    if !device().is_cpu() {
        return Ok(());
    }
    let beyond = (experts.ones_like()? * 6.)?;
    let error = router.replay(&logits, &beyond).unwrap_err().to_string();
    assert!(error.starts_with("experts: 6, must be below 6"), "{error}");
    Ok(())
}
