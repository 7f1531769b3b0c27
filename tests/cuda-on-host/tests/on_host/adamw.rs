//! Tests of `adamw.cu` against the formula in f64 and the CPU path.

use candle_core::{DType, Device, Result, Tensor, Var, WithDType};
use candle_grpo_cuda_on_host::{
    Buffer, Expected, Grid, ORDERS, adamw as launch, adamw_quantized as launch_quantized,
};
use candle_grpo_kernels::{AdamWStep, AdamWTensors, Rounding, adamw, moment_blocks, moment_codes};
use candle_grpo_test_support::{noise, numbers};
use half::bf16;

const BETA1: f64 = 0.9;
const BETA2: f64 = 0.99;
const EPSILON: f64 = 1e-6;
const LEARNING_RATE: f64 = 0.3;
const WEIGHT_DECAY: f64 = 0.1;
const STEP: i32 = 100;
const KEEP: f64 = 1.0 - LEARNING_RATE * WEIGHT_DECAY;
const FACTOR: f64 = 0.7;
/// Elements of a block, as in the kernels.
const CHUNK: usize = 4096;
const QUANTIZED_CHUNK: usize = 2048;
const HYPERPARAMETERS: AdamWStep = AdamWStep {
    learning_rate: LEARNING_RATE,
    beta1: BETA1,
    beta2: BETA2,
    epsilon: EPSILON,
    step: STEP as usize,
    gradient_factor: FACTOR,
};

/// Runs the kernel for moments in f32, or with `maps` the one for moments in blocks.
///
/// # Safety
///
/// The list must have `count` rows with the addresses of buffers that the blocks cover.
unsafe fn run(blocks: usize, order: u32, list: &[u64], count: u32, maps: Option<&[f32]>) {
    let grid = Grid::new(blocks as u32, 256);
    let list = list.as_ptr();
    let [factor, beta1, beta2] = [FACTOR, BETA1, BETA2].map(|x| x as f32);
    let [rest1, rest2] = [BETA1, BETA2].map(|beta| (1.0 - beta) as f32);
    let [epsilon, size, root] = [EPSILON, step_size(), 1.0 / root_correction()].map(|x| x as f32);
    let number = STEP as u32;
    // SAFETY: the caller's promise.
    let ended = unsafe {
        match maps {
            None => launch(
                grid, order, list, count, factor, beta1, rest1, beta2, rest2, epsilon, size, root,
                number,
            ),
            Some(maps) => launch_quantized(
                grid,
                order,
                list,
                maps.as_ptr(),
                count,
                factor,
                beta1,
                rest1,
                beta2,
                rest2,
                epsilon,
                size,
                root,
                number,
            ),
        }
    };
    ended.unwrap();
}

fn step_size() -> f64 {
    LEARNING_RATE / (1.0 - BETA1.powi(STEP))
}

fn root_correction() -> f64 {
    (1.0 - BETA2.powi(STEP)).sqrt()
}

/// Returns p, m and v after the step.
fn formula(p: &[f64], m: &[f64], v: &[f64], g: &[f64]) -> [Vec<f64>; 3] {
    let g: Vec<f64> = g.iter().map(|g| g * FACTOR).collect();
    let m: Vec<f64> = m
        .iter()
        .zip(&g)
        .map(|(m, g)| m * BETA1 + g * (1.0 - BETA1))
        .collect();
    let v: Vec<f64> = v
        .iter()
        .zip(&g)
        .map(|(v, g)| v * BETA2 + g * g * (1.0 - BETA2))
        .collect();
    let p = p
        .iter()
        .zip(m.iter().zip(&v))
        .map(|(p, (m, v))| p * KEEP - step_size() * m / (v.sqrt() / root_correction() + EPSILON));
    [p.collect(), m, v]
}

fn rounded<T: WithDType>(numbers: &[f32]) -> Vec<T> {
    numbers.iter().map(|x| T::from_f64(f64::from(*x))).collect()
}

/// Returns the kernels' number for the dtypes of a parameter and its gradient.
fn dtypes<T: WithDType, G: WithDType>() -> u64 {
    let number = |dtype| {
        let dtypes = [DType::F32, DType::BF16, DType::F16];
        let number = dtypes.iter().position(|one| *one == dtype);
        number.expect("a dtype of the kernel") as u64
    };
    number(T::DTYPE) + 4 * number(G::DTYPE)
}

/// Checks `n` elements, followed by `behind` others in memory, with or without a master, with a
/// gradient of type G.
fn check<T: WithDType, G: WithDType>(
    n: usize,
    behind: usize,
    has_master: bool,
    tolerance: f64,
) -> Result<()> {
    let with_behind = |numbers: &[f64]| -> Vec<f32> {
        let mut numbers: Vec<f32> = numbers.iter().map(|x| *x as f32).collect();
        numbers.resize(n + behind, 7.0);
        numbers
    };
    let wide = |numbers: &[T]| -> Vec<f64> { numbers[..n].iter().map(|x| x.to_f64()).collect() };
    let exact =
        |numbers: &[f32]| -> Vec<f64> { numbers[..n].iter().map(|x| f64::from(*x)).collect() };

    let p = with_behind(&noise(n, 1));
    let m = with_behind(&noise(n, 2));
    let v = with_behind(&noise(n, 3).iter().map(|x| x * x).collect::<Vec<_>>());
    let g = with_behind(&noise(n, 4));
    let (p_like, g) = (rounded::<T>(&p), rounded::<G>(&g));
    let start = if has_master { exact(&p) } else { wide(&p_like) };
    let gradient: Vec<f64> = g[..n].iter().map(|x| x.to_f64()).collect();
    let [p_exact, m_exact, v_exact] = formula(&start, &exact(&m), &exact(&v), &gradient);

    let variable = |x: &[f32]| Var::from_slice(&x[..n], n, &Device::Cpu);
    let p_on_cpu = Var::from_slice(&p_like[..n], n, &Device::Cpu)?;
    let (master_on_cpu, m_on_cpu, v_on_cpu) = (variable(&p)?, variable(&m)?, variable(&v)?);
    // The operator has no master for an f32 parameter: it is its own master.
    let is_own_master = has_master && T::DTYPE == DType::F32;
    let tensors = AdamWTensors {
        parameter: &p_on_cpu,
        master: (has_master && !is_own_master).then_some(master_on_cpu.as_tensor()),
        rounding: Rounding::Nearest,
        average: &m_on_cpu,
        square: &v_on_cpu,
        gradient: &Tensor::from_slice(&g[..n], n, &Device::Cpu)?,
        weight_decay: WEIGHT_DECAY,
    };
    adamw(&[tensors], &HYPERPARAMETERS)?;
    let expected = |exact: &[f64], on_cpu: &Var| -> Result<Expected> {
        Ok(Expected {
            exact: exact.to_vec(),
            on_cpu: numbers(on_cpu)?,
        })
    };
    let p_expected = expected(&p_exact, &p_on_cpu)?;
    let m_expected = expected(&m_exact, &m_on_cpu)?;
    let v_expected = expected(&v_exact, &v_on_cpu)?;
    let master_expected = match (has_master, is_own_master) {
        (true, true) => expected(&p_exact, &p_on_cpu)?,
        (true, false) => expected(&p_exact, &master_on_cpu)?,
        (false, _) => expected(&exact(&p), &master_on_cpu)?,
    };

    for order in ORDERS {
        let mut parameter = Buffer::new(&p_like);
        // One further element changes the alignment of the master to 16 bytes.
        let further: Vec<f32> = p.iter().copied().chain([7.0]).collect();
        let (mut master, mut average, mut square) =
            (Buffer::new(&further), Buffer::new(&m), Buffer::new(&v));
        let g = Buffer::new(&g);
        let master_or_null = if has_master {
            master.as_mut_ptr()
        } else {
            std::ptr::null_mut()
        };
        // The parameter is between two others, of several blocks and of one.
        let mut others: Vec<_> = [5000, 1].map(|n| Buffer::new(&vec![0f32; 4 * n])).into();
        let mut list = Vec::new();
        let mut blocks = 0;
        let mut push = |addresses: [u64; 5], n: usize, dtypes: u64| {
            list.extend(addresses);
            list.extend([
                n as u64,
                blocks | dtypes << 32,
                u64::from((KEEP as f32).to_bits()),
                0,
                0,
            ]);
            blocks += n.div_ceil(CHUNK) as u64;
        };
        let zeros = |buffer: &mut Buffer<f32>| {
            let quarter = buffer.len() / 4;
            let at = |i: usize| buffer[i * quarter..].as_ptr().addr() as u64;
            ([at(0), 0, at(1), at(2), at(3)], quarter)
        };
        let (addresses, len) = zeros(&mut others[0]);
        push(addresses, len, 0);
        let addresses = [
            parameter.as_mut_ptr().addr(),
            master_or_null.addr(),
            average.as_mut_ptr().addr(),
            square.as_mut_ptr().addr(),
            g.as_ptr().addr(),
        ];
        push(addresses.map(|x| x as u64), n, dtypes::<T, G>());
        let (addresses, len) = zeros(&mut others[1]);
        push(addresses, len, 0);
        let list = Buffer::new(&list);
        // SAFETY: the list has the addresses of buffers of n elements.
        unsafe { run(blocks as usize, order, &list, 3, None) };
        for other in &others {
            assert!(other.iter().all(|x| *x == 0.0));
        }
        p_expected.assert_close(&wide(&parameter), tolerance);
        m_expected.assert_close(&exact(&average), 1e-6);
        v_expected.assert_close(&exact(&square), 1e-6);
        master_expected.assert_close(&exact(&master), 1e-5);
        assert!(parameter[n..].iter().all(|x| x.to_f64() == 7.0));
        for state in [&master, &average, &square] {
            assert!(state[n..].iter().all(|x| *x == 7.0));
        }
    }
    Ok(())
}

fn check_all<T: WithDType>(tolerance: f64) -> Result<()> {
    for n in [1, 4, 1023, 2048, 9001] {
        check::<T, f32>(n, 0, false, tolerance)?;
        check::<T, f32>(n, 1, true, tolerance)?;
        check::<T, T>(n, 0, true, tolerance)?;
        check::<T, T>(n, 2, false, tolerance)?;
        check::<T, bf16>(n, 0, false, tolerance)?;
    }
    Ok(())
}

each_dtype!(equals_the_formula_and_the_cpu_path: f32 1e-5, bf16 4e-3, f16 6e-4);

/// The codes of a block whose numbers differ from those of the CPU path by rounding are equal, or
/// next to each other.
fn assert_close_blocks(found: &[u8], expected: &[u8]) {
    assert_eq!(found.len(), expected.len());
    for (at, (&a, &b)) in found.iter().zip(expected).enumerate() {
        // The bytes of the scale.
        let most = if at % 260 < 256 { 1 } else { 2 };
        if at % 260 < 257 {
            assert!(a.abs_diff(b) <= most, "byte {at}: {a}, {b}");
        } else {
            assert_eq!(a, b, "byte {at}");
        }
    }
}

fn check_blocks<T: WithDType, G: WithDType>(
    n: usize,
    has_master: bool,
    tolerance: f64,
) -> Result<()> {
    let single = |numbers: Vec<f64>| numbers.iter().map(|x| *x as f32).collect::<Vec<_>>();
    let (p, g) = (single(noise(n, 1)), single(noise(n, 4)));
    let (p_like, g) = (rounded::<T>(&p), rounded::<G>(&g));
    let bytes = moment_blocks(n).elem_count();
    let cpu = &Device::Cpu;
    let p_on_cpu = Var::from_slice(&p_like, n, cpu)?;
    let master_on_cpu = Var::from_slice(&p, n, cpu)?;
    let zeros = || Var::zeros(moment_blocks(n), DType::U8, cpu);
    let (m_on_cpu, v_on_cpu) = (zeros()?, zeros()?);
    let tensors = AdamWTensors {
        parameter: &p_on_cpu,
        master: has_master.then_some(master_on_cpu.as_tensor()),
        rounding: Rounding::Nearest,
        average: &m_on_cpu,
        square: &v_on_cpu,
        gradient: &Tensor::from_slice(&g, n, cpu)?,
        weight_decay: WEIGHT_DECAY,
    };
    // The second step reads the blocks that the first one wrote.
    adamw(&[tensors], &HYPERPARAMETERS)?;
    let first = [&m_on_cpu, &v_on_cpu].map(|moment| moment.flatten_all()?.to_vec1::<u8>());
    let [m_first, v_first] = first;
    let (m_first, v_first) = (m_first?, v_first?);
    let (p_first, master_first) = (numbers(&p_on_cpu)?, numbers(&master_on_cpu)?);
    adamw(&[tensors], &HYPERPARAMETERS)?;
    let maps = moment_codes().concat();

    for order in ORDERS {
        let start: Vec<T> = p_first.iter().map(|x| T::from_f64(*x)).collect();
        let mut parameter = Buffer::new(&start);
        let mut master = Buffer::new(&single(master_first.clone()));
        let (mut average, mut square) = (Buffer::new(&m_first), Buffer::new(&v_first));
        let g = Buffer::new(&g);
        let list = Buffer::new(&[
            parameter.as_mut_ptr().addr() as u64,
            if has_master {
                master.as_mut_ptr().addr() as u64
            } else {
                0
            },
            average.as_mut_ptr().addr() as u64,
            square.as_mut_ptr().addr() as u64,
            g.as_ptr().addr() as u64,
            n as u64,
            dtypes::<T, G>() << 32,
            u64::from((KEEP as f32).to_bits()),
            0,
            0,
        ]);
        let maps = Buffer::new(&maps);
        // SAFETY: the list has the addresses of buffers of n elements and of their blocks.
        unsafe { run(n.div_ceil(QUANTIZED_CHUNK), order, &list, 1, Some(&maps)) };
        let close = |found: &[f64], on_cpu: &Var| -> Result<()> {
            let exact = numbers(on_cpu)?;
            Expected {
                exact: exact.clone(),
                on_cpu: exact,
            }
            .assert_close(found, tolerance);
            Ok(())
        };
        close(
            &parameter.iter().map(|x| x.to_f64()).collect::<Vec<_>>(),
            &p_on_cpu,
        )?;
        close(
            &master.iter().map(|x| f64::from(*x)).collect::<Vec<_>>(),
            &master_on_cpu,
        )?;
        for (found, on_cpu) in [(&average, &m_on_cpu), (&square, &v_on_cpu)] {
            assert_eq!(found.len(), bytes);
            assert_close_blocks(found, &on_cpu.flatten_all()?.to_vec1::<u8>()?);
        }
    }
    Ok(())
}

fn check_all_blocks<T: WithDType>(tolerance: f64) -> Result<()> {
    for n in [1, 255, 257, 2049, 5000] {
        check_blocks::<T, f32>(n, false, tolerance)?;
        check_blocks::<T, T>(n, false, tolerance)?;
        check_blocks::<T, bf16>(n, false, tolerance)?;
        // An f32 parameter has no master.
        if T::DTYPE != DType::F32 {
            check_blocks::<T, f32>(n, true, tolerance)?;
            check_blocks::<T, T>(n, true, tolerance)?;
        }
    }
    Ok(())
}

mod quantized {
    use super::*;

    fn check_all<T: WithDType>(tolerance: f64) -> Result<()> {
        check_all_blocks::<T>(tolerance)
    }

    each_dtype!(equals_the_cpu_path: f32 1e-5, bf16 4e-3, f16 6e-4);
}

/// Checks the random rounding of `n` elements that only decay: their products have the same bits in
/// the kernel and on the CPU path. The step begins after `first` elements of the parameter.
fn check_random(n: usize, first: u64, quantized: bool) -> Result<()> {
    const KEY: u64 = 0x0123_4567_89ab_cdef;
    let p: Vec<bf16> = noise(n, 1).iter().map(|x| bf16::from_f64(*x)).collect();
    let cpu = &Device::Cpu;
    let p_on_cpu = Var::from_slice(&p, n, cpu)?;
    let moment = || {
        if quantized {
            Var::zeros(moment_blocks(n), DType::U8, cpu)
        } else {
            Var::zeros(n, DType::F32, cpu)
        }
    };
    let (m_on_cpu, v_on_cpu) = (moment()?, moment()?);
    let tensors = AdamWTensors {
        parameter: &p_on_cpu,
        master: None,
        rounding: Rounding::Stochastic { key: KEY, first },
        average: &m_on_cpu,
        square: &v_on_cpu,
        gradient: &Tensor::zeros(n, DType::F32, cpu)?,
        weight_decay: WEIGHT_DECAY,
    };
    adamw(&[tensors], &HYPERPARAMETERS)?;
    let expected = p_on_cpu.to_vec1::<bf16>()?;
    let nearest = |x: &bf16| bf16::from_f32(x.to_f32() * KEEP as f32);
    let differ = p.iter().zip(&expected).filter(|(p, e)| nearest(p) != **e);
    assert!(n < 100 || differ.count() > n / 8);

    for order in ORDERS {
        let mut parameter = Buffer::new(&p);
        let bytes = if quantized {
            moment_blocks(n).elem_count()
        } else {
            4 * n
        };
        let (mut average, mut square) = (
            Buffer::new(&vec![0u8; bytes]),
            Buffer::new(&vec![0u8; bytes]),
        );
        let g = Buffer::new(&vec![0f32; n]);
        let list = Buffer::new(&[
            parameter.as_mut_ptr().addr() as u64,
            0,
            average.as_mut_ptr().addr() as u64,
            square.as_mut_ptr().addr() as u64,
            g.as_ptr().addr() as u64,
            n as u64,
            (dtypes::<bf16, f32>() + 16) << 32,
            u64::from((KEEP as f32).to_bits()),
            KEY,
            first / 8,
        ]);
        let maps = Buffer::new(&moment_codes().concat());
        let (chunk, maps) = if quantized {
            (QUANTIZED_CHUNK, Some(&maps[..]))
        } else {
            (CHUNK, None)
        };
        // SAFETY: the list has the addresses of buffers of n elements, or of their blocks.
        unsafe { run(n.div_ceil(chunk), order, &list, 1, maps) };
        assert_eq!(parameter[..], expected, "{n} elements after {first}");
    }
    Ok(())
}

#[test]
fn random_rounding_has_the_bits_of_the_cpu_path() -> Result<()> {
    for n in [1, 4, 7, 13, 255, 4101, 9001] {
        for first in [0, 8, 1 << 40] {
            for quantized in [false, true] {
                check_random(n, first, quantized)?;
            }
        }
    }
    Ok(())
}
