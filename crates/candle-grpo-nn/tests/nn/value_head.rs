//! The value head.

use candle_core::{DType, Result, Tensor};
use candle_grpo_nn::{Decoder, Gradients, ValueHead};
use candle_grpo_test_support::{device, message};
use candle_nn::VarBuilder;

use crate::small::{config, left_padded, lively};

#[test]
fn values_are_a_linear_map_of_each_position() -> Result<()> {
    let tensors = std::collections::HashMap::from([
        (
            "score.weight".to_owned(),
            Tensor::new(&[[2f32, -1.]], device())?,
        ),
        ("score.bias".to_owned(), Tensor::new(&[0.5f32], device())?),
    ]);
    let head = ValueHead::new(2, VarBuilder::from_tensors(tensors, DType::F32, device()))?;
    let hidden = Tensor::new(&[[[1f32, 1.], [0., 3.]], [[2., 0.], [0., 0.]]], device())?;
    assert_eq!(
        head.forward(&hidden)?.to_vec2::<f32>()?,
        [[1.5, -2.5], [4.5, 0.5]]
    );
    assert_eq!(
        head.forward(&hidden.get(0)?.get(0)?)?.to_scalar::<f32>()?,
        1.5
    );
    let error = message(head.forward(&hidden.narrow(2, 0, 1)?));
    assert!(
        error.starts_with("hidden: shape [2, 2, 1], must be [.., 2]"),
        "{error}"
    );
    Ok(())
}

/// A tied decoder has no separate output layer, which a critic would not use.
#[test]
fn every_variable_of_a_critic_gets_a_gradient() -> Result<()> {
    let model = config(true);
    let parameters = ValueHead::add_to(lively(&model)?, model.hidden_size)?;
    let decoder = Decoder::new(&model, parameters.var_builder())?;
    let head = ValueHead::new(model.hidden_size, parameters.var_builder())?;
    let (ids, mask) = left_padded()?;
    let values = head.forward(&decoder.padded_hidden_states(&ids, &mask)?)?;
    assert_eq!(values.dims(), ids.dims());
    let loss = (values - 1.)?.sqr()?.mean_all()?;
    let mut gradients = Gradients::new();
    gradients.accumulate(&loss, &parameters)?;
    assert_eq!(gradients.iter().count(), parameters.len());
    // All values are 0, so the bias has the gradient of the mean of (v - 1)^2.
    let bias_gradient = gradients.get("score.bias").map(Tensor::to_vec1::<f32>);
    assert!((bias_gradient.expect("a gradient")?[0] + 2.).abs() < 1e-5);

    let error = message(ValueHead::add_to(parameters, model.hidden_size));
    assert!(
        error.starts_with("score.weight: a variable of that name exists"),
        "{error}"
    );
    Ok(())
}
