//! The path of [`adamw`](crate::adamw()) for parameters on CUDA whose state is on the CPU.

use std::ops::Range;
use std::sync::Arc;

use candle_core::cuda_backend::cudarc::driver::{
    CudaEvent, CudaStream, PinnedHostSlice, ValidAsZeroBits, result,
};
use candle_core::{Error, Result, Tensor};

use super::cpu::{State, with_master, with_moment};
use super::moments::NUMBERS_IN_BLOCK;
use super::rounding::Random;
use super::{AdamWStep, AdamWTensors, Narrow};
use crate::cpu::element::Element;
use crate::cpu::with_element;
use crate::cuda::CudaElement;
use crate::cuda::tensor_list::address;

/// The elements that are copied together, a multiple of the elements in a block of codes. The
/// gradients of two pieces and the parameters of two are in page-locked memory: 32 MiB in f32.
const PIECE: usize = 1 << 21;

/// Updates nonempty f32, bf16 and f16 parameters.
pub(super) fn step(parameters: &[&AdamWTensors], step: &AdamWStep) -> Result<()> {
    let Some(first) = parameters.first() else {
        return Ok(());
    };
    let (here, others) = parameters.iter().partition::<Vec<_>, _>(|tensors| {
        tensors
            .parameter
            .device()
            .same_device(first.parameter.device())
            && tensors.parameter.dtype() == first.parameter.dtype()
            && tensors.gradient.dtype() == first.gradient.dtype()
    });
    with_element!(first.parameter.dtype(), "parameter", P => {
        with_element!(first.gradient.dtype(), "gradient", G => step_of::<P, G>(&here, step)?)
    });
    self::step(&others, step)
}

/// Updates parameters on one device.
fn step_of<P, G>(parameters: &[&AdamWTensors], step: &AdamWStep) -> Result<()>
where
    P: Element + CudaElement + ValidAsZeroBits,
    G: Element + CudaElement + ValidAsZeroBits,
{
    let gradients = parameters
        .iter()
        .map(|tensors| tensors.gradient.contiguous());
    let gradients = gradients.collect::<Result<Vec<_>>>()?;
    let (mut pieces, mut longest) = (Vec::new(), 0);
    for (tensors, gradient) in parameters.iter().zip(&gradients) {
        let elements = tensors.parameter.elem_count();
        longest = longest.max(elements.min(PIECE));
        for start in (0..elements).step_by(PIECE) {
            let range = start..elements.min(start + PIECE);
            pieces.push(Piece {
                tensors,
                gradient,
                range,
            });
        }
    }
    let Some(first) = pieces.first() else {
        return Ok(());
    };
    let device = first.gradient.device().as_cuda_device()?;
    let mut copies = Copies::<P, G>::new(&device.cuda_stream(), longest)?;
    copies.fetch(0, first)?;
    for (at, piece) in pieces.iter().enumerate() {
        if let Some(next) = pieces.get(at + 1) {
            // While the CPU updates this one. The stream has sent the piece before from there.
            copies.fetch((at + 1) % 2, next)?;
        }
        copies.update(at % 2, piece, step)?;
        copies.send(at % 2, piece)?;
    }
    copies.stream.synchronize().map_err(Error::wrap)
}

/// Elements of a parameter that are updated together.
struct Piece<'a> {
    tensors: &'a AdamWTensors<'a>,
    gradient: &'a Tensor,
    range: Range<usize>,
}

impl Piece<'_> {
    /// These elements of a contiguous tensor.
    fn of(&self, tensor: &Tensor) -> Result<Tensor> {
        let flat = tensor.detach().flatten_all()?;
        flat.narrow(0, self.range.start, self.range.len())
    }

    /// These elements of a moment.
    fn of_moment(&self, moment: &Tensor) -> Result<Tensor> {
        if !self.tensors.is_quantized() {
            return self.of(moment);
        }
        let blocks = self.range.len().div_ceil(NUMBERS_IN_BLOCK);
        (moment.detach()).narrow(0, self.range.start / NUMBERS_IN_BLOCK, blocks)
    }
}

/// Page-locked memory for two pieces, to and from which a stream copies while the CPU works.
struct Copies<P, G> {
    stream: Arc<CudaStream>,
    places: [Place<P, G>; 2],
}

struct Place<P, G> {
    gradient: PinnedHostSlice<G>,
    parameter: PinnedHostSlice<P>,
    /// Recorded once both are there.
    fetched: CudaEvent,
}

impl<P, G> Drop for Copies<P, G> {
    fn drop(&mut self) {
        // After an error. The memory must stay until the stream has copied it.
        let _ = self.stream.synchronize();
    }
}

impl<P, G> Copies<P, G>
where
    P: Element + CudaElement + ValidAsZeroBits,
    G: Element + CudaElement + ValidAsZeroBits,
{
    /// Allocates memory for pieces of up to this number of elements.
    fn new(stream: &Arc<CudaStream>, elements: usize) -> Result<Self> {
        let context = stream.context();
        let place = || -> Result<_> {
            // SAFETY: a slice is read after it is filled. Any bits are a float.
            #[allow(unsafe_code)]
            let (gradient, parameter) = unsafe {
                (
                    context.alloc_pinned_with_flags(elements, 0),
                    context.alloc_pinned_with_flags(elements, 0),
                )
            };
            Ok(Place {
                gradient: gradient.map_err(Error::wrap)?,
                parameter: parameter.map_err(Error::wrap)?,
                fetched: context.new_event(None).map_err(Error::wrap)?,
            })
        };
        Ok(Self {
            stream: Arc::clone(stream),
            places: [place()?, place()?],
        })
    }

    /// Starts to copy the gradient, and the parameter unless a master replaces it.
    fn fetch(&mut self, place: usize, piece: &Piece<'_>) -> Result<()> {
        let (stream, place) = (&self.stream, &mut self.places[place]);
        fetch(stream, &piece.of(piece.gradient)?, &mut place.gradient)?;
        if piece.tensors.master.is_none() {
            let parameter = piece.of(piece.tensors.parameter)?;
            fetch(stream, &parameter, &mut place.parameter)?;
        }
        place.fetched.record(stream).map_err(Error::wrap)
    }

    /// Waits for the copies, and updates the parameter and its state.
    fn update(&mut self, place: usize, piece: &Piece<'_>, step: &AdamWStep) -> Result<()> {
        let Piece { tensors, range, .. } = piece;
        let place = &mut self.places[place];
        place.fetched.synchronize().map_err(Error::wrap)?;
        let gradient = place.gradient.as_slice().map_err(Error::wrap)?;
        let gradient = &gradient[..range.len()];
        let parameter = place.parameter.as_mut_slice().map_err(Error::wrap)?;
        let parameter = &mut parameter[..range.len()];
        let coefficients = Narrow::from(step.coefficients(tensors.weight_decay));
        let random = tensors
            .random(step)
            .map(|random: Random| random.after(range.start));
        let master = tensors.master.map(|master| piece.of(master)).transpose()?;
        with_moment(&piece.of_moment(tensors.average)?, |average| {
            with_moment(&piece.of_moment(tensors.square)?, |square| {
                with_master(master.as_ref(), |master| {
                    let state = State {
                        average,
                        square,
                        master,
                        random,
                    };
                    state.update(parameter, gradient, &coefficients);
                    Ok(())
                })
            })
        })
    }

    /// Starts to copy the updated parameter to the device.
    fn send(&self, place: usize, piece: &Piece<'_>) -> Result<()> {
        let parameter = self.places[place]
            .parameter
            .as_slice()
            .map_err(Error::wrap)?;
        let to = address(&piece.of(piece.tensors.parameter)?, &self.stream)?;
        // SAFETY: the tensor has these elements of this dtype, and nothing else uses it. The memory
        // stays until the stream has copied it: nothing writes it before the next event.
        #[allow(unsafe_code)]
        unsafe {
            let parameter = &parameter[..piece.range.len()];
            result::memcpy_htod_async(to, parameter, self.stream.cu_stream()).map_err(Error::wrap)
        }
    }
}

/// Starts to copy a contiguous tensor to the beginning of `to`.
fn fetch<T: CudaElement + ValidAsZeroBits>(
    stream: &CudaStream,
    tensor: &Tensor,
    to: &mut PinnedHostSlice<T>,
) -> Result<()> {
    let from = address(tensor, stream)?;
    let to = to.as_mut_slice().map_err(Error::wrap)?;
    // SAFETY: the tensor has these elements of this dtype, and the memory stays until the stream
    // has copied it. Nothing reads it before the event.
    #[allow(unsafe_code)]
    unsafe {
        let to = &mut to[..tensor.elem_count()];
        result::memcpy_dtoh_async(to, from, stream.cu_stream()).map_err(Error::wrap)
    }
}
