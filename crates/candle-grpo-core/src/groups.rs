//! Groups: samples that share a prompt.

use std::collections::HashMap;

use candle_core::{DType, Device, Result, Tensor, bail};

/// A batch's groups: samples in one group share a prompt.
///
/// Functions accept `impl Into<Groups>`. If samples for the same prompt are adjacent, pass the
/// group size. Otherwise, pass each sample's group id as a slice or vector of integers, in any
/// order and with groups of any size.
///
/// ```
/// use candle_grpo_core::Groups;
/// let blocks: Groups = 4.into(); // samples 0..4, 4..8, ...
/// let ids: Groups = [7u32, 3, 7, 3, 3].as_slice().into(); // samples 0 and 2; samples 1, 3 and 4
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Groups {
    /// Consecutive blocks with this many samples each.
    Consecutive(usize),
    /// `ids[i]` is the group of sample `i`.
    Ids(Vec<i64>),
}

impl From<usize> for Groups {
    fn from(size: usize) -> Self {
        Self::Consecutive(size)
    }
}

macro_rules! ids_from {
    ($($int:ty),*) => {$(
        impl From<&[$int]> for Groups {
            fn from(ids: &[$int]) -> Self {
                // Only equality matters between ids, and `as` between 64-bit integers preserves it.
                Self::Ids(ids.iter().map(|&i| i as i64).collect())
            }
        }
        impl From<&Vec<$int>> for Groups {
            fn from(ids: &Vec<$int>) -> Self {
                ids.as_slice().into()
            }
        }
        impl From<Vec<$int>> for Groups {
            fn from(ids: Vec<$int>) -> Self {
                ids.as_slice().into()
            }
        }
    )*};
}
ids_from!(i32, i64, u32, u64, usize);

impl From<&Groups> for Groups {
    fn from(groups: &Groups) -> Self {
        groups.clone()
    }
}

impl Groups {
    /// Groups samples by role. For the roles in `within_episode`, also groups by episode
    /// (`hierarchical_grpo` in prime-rl).
    ///
    /// Any other role has one group over all episodes, so its rewards must be comparable between
    /// episodes.
    ///
    /// # Errors
    ///
    /// Fails if there is not one episode for each role.
    ///
    /// ```
    /// use candle_grpo_core::Groups;
    ///
    /// // Role 1 is compared within its episode, role 0 over all of them.
    /// let groups = Groups::of_roles(&[0, 1, 0, 1], &[7, 7, 8, 8], &[1])?;
    /// assert_eq!(groups, Groups::Ids(vec![0, 1, 0, 2]));
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn of_roles(roles: &[i64], episodes: &[i64], within_episode: &[i64]) -> Result<Self> {
        if roles.len() != episodes.len() {
            bail!(
                "episodes: {} for {} roles, there must be one for each",
                episodes.len(),
                roles.len()
            );
        }
        let mut ids = HashMap::new();
        let id = |(role, episode): (&i64, &i64)| {
            let episode = within_episode.contains(role).then_some(*episode);
            let next = ids.len() as i64;
            *ids.entry((*role, episode)).or_insert(next)
        };
        Ok(Self::Ids(roles.iter().zip(episodes).map(id).collect()))
    }

    /// Returns an id for each of `rows` rows. Errors refer to the groups as `name`.
    pub(crate) fn to_ids(&self, name: &str, rows: usize) -> Result<Vec<i64>> {
        match self {
            Self::Ids(ids) if ids.len() == rows => Ok(ids.clone()),
            Self::Ids(ids) => bail!(
                "{name}: {} ids for {rows} rows, there must be one for each",
                ids.len()
            ),
            Self::Consecutive(size) if *size > 0 && rows.is_multiple_of(*size) => {
                Ok((0..rows).map(|row| (row / size) as i64).collect())
            }
            Self::Consecutive(size) => bail!(
                "{name}: blocks of {size} for {rows} rows, the size must be positive and divide their number"
            ),
        }
    }
}

/// A layout with one row for each of P groups, W samples wide, the size of the largest group. Use
/// it for computations within groups, for example in your own
/// [`AdvantageEstimator`](crate::AdvantageEstimator). The batch has B samples.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_core::{GroupLayout, Groups};
///
/// let groups = Groups::from([7u32, 3, 7, 3, 3].as_slice());
/// let layout = GroupLayout::new(&groups, 5, &Device::Cpu)?;
/// assert_eq!(layout.sizes(), [2, 3]);
///
/// let rewards = Tensor::new(&[1f32, 2., 3., 4., 6.], &Device::Cpu)?;
/// let present = layout.present()?.to_dtype(rewards.dtype())?;
/// let sums = (layout.to_rows(&rewards)? * &present)?.sum_keepdim(1)?;
/// let means = (sums / present.sum_keepdim(1)?)?;
/// let centered = (rewards - layout.to_members(&means)?)?;
/// assert_eq!(centered.to_vec1::<f32>()?, [-1., -2., 1., 0., 2.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct GroupLayout {
    sizes: Vec<usize>,
    width: usize,
    ragged: Option<Ragged>,
    device: Device,
}

/// Map between samples and rows, for groups that are not consecutive blocks with equal size.
#[derive(Debug, Clone)]
struct Ragged {
    /// `[P * W]`: the sample at each place in the rows. An empty place has an arbitrary one.
    sample_at: Tensor,
    /// `[P, W]`, u8: 1 where there is a sample.
    present: Tensor,
    /// `[B]`: each sample's place.
    place_of: Tensor,
}

impl GroupLayout {
    /// Creates the layout for `batch` samples in `groups`, for tensors on `device`.
    ///
    /// # Errors
    ///
    /// Fails if the group size is 0 or does not divide `batch`, or if there is not one id for each
    /// sample.
    pub fn new(groups: &Groups, batch: usize, device: &Device) -> Result<Self> {
        match groups {
            Groups::Consecutive(0) => {
                bail!("groups: 0, a group must have at least one sample")
            }
            Groups::Consecutive(size) if !batch.is_multiple_of(*size) => bail!(
                "groups: {size} for {batch} samples, must divide their number (or be the group id of each sample, for groups of unequal size)"
            ),
            Groups::Consecutive(size) => Ok(Self {
                sizes: vec![*size; batch / size],
                width: *size,
                ragged: None,
                device: device.clone(),
            }),
            Groups::Ids(ids) if ids.len() != batch => bail!(
                "groups: {} ids for {batch} samples, there must be one for each",
                ids.len()
            ),
            Groups::Ids(ids) => Self::from_ids(ids, device),
        }
    }

    fn from_ids(ids: &[i64], device: &Device) -> Result<Self> {
        let mut row_of_id = HashMap::new();
        let mut members: Vec<Vec<u32>> = Vec::new();
        for (sample, id) in ids.iter().enumerate() {
            let row = *row_of_id.entry(*id).or_insert_with(|| {
                members.push(Vec::new());
                members.len() - 1
            });
            members[row].push(sample as u32);
        }
        let sizes: Vec<usize> = members.iter().map(Vec::len).collect();
        let width = sizes.iter().copied().max().unwrap_or(0);
        let mut sample_at = Vec::with_capacity(members.len() * width);
        let mut present = Vec::with_capacity(members.len() * width);
        let mut place_of = vec![0u32; ids.len()];
        for (row, samples) in members.iter().enumerate() {
            for column in 0..width {
                match samples.get(column) {
                    Some(&sample) => {
                        place_of[sample as usize] = (row * width + column) as u32;
                        sample_at.push(sample);
                        present.push(1u8);
                    }
                    None => {
                        sample_at.push(samples[0]);
                        present.push(0);
                    }
                }
            }
        }
        let rows = members.len();
        Ok(Self {
            width,
            ragged: Some(Ragged {
                sample_at: Tensor::from_vec(sample_at, rows * width, device)?,
                present: Tensor::from_vec(present, (rows, width), device)?,
                place_of: Tensor::from_vec(place_of, ids.len(), device)?,
            }),
            sizes,
            device: device.clone(),
        })
    }

    /// Returns each group's number of samples, in row order: groups are ordered by their first
    /// sample.
    pub fn sizes(&self) -> &[usize] {
        &self.sizes
    }

    /// Arranges `x`, `[B, ..]`, in group rows, `[P, W, ..]`. A place without a sample repeats
    /// another one from the group: see [`Self::present`].
    ///
    /// # Errors
    ///
    /// Fails if `x` does not have B samples or is on another device.
    pub fn to_rows(&self, x: &Tensor) -> Result<Tensor> {
        let batch: usize = self.sizes.iter().sum();
        if x.dims().first() != Some(&batch) {
            bail!("x: shape {:?}, must be [{batch}, ..]", x.dims());
        }
        let mut rows = vec![self.sizes.len(), self.width];
        rows.extend_from_slice(&x.dims()[1..]);
        match &self.ragged {
            None => x.reshape(rows),
            Some(r) => x.contiguous()?.index_select(&r.sample_at, 0)?.reshape(rows),
        }
    }

    /// Arranges group rows, `[P, W, ..]`, as samples, `[B, ..]`: the inverse of [`Self::to_rows`].
    ///
    /// # Errors
    ///
    /// Fails if `rows` has another shape or is on another device.
    pub fn to_samples(&self, rows: &Tensor) -> Result<Tensor> {
        let shape = [self.sizes.len(), self.width];
        if rows.dims().get(..2) != Some(&shape) {
            let [groups, width] = shape;
            bail!(
                "rows: shape {:?}, must be [{groups}, {width}, ..]",
                rows.dims()
            );
        }
        let flat = rows.contiguous()?.flatten(0, 1)?;
        match &self.ragged {
            None => Ok(flat),
            Some(r) => flat.index_select(&r.place_of, 0),
        }
    }

    /// Repeats `per_group`, `[P, 1]`, for each sample in the group, `[B]`.
    ///
    /// # Errors
    ///
    /// Fails if `per_group` has another shape or is on another device.
    pub fn to_members(&self, per_group: &Tensor) -> Result<Tensor> {
        self.to_samples(&per_group.broadcast_as((self.sizes.len(), self.width))?)
    }

    /// Returns 1 where the rows have a sample and 0 elsewhere, u8 `[P, W]`.
    ///
    /// # Errors
    ///
    /// Fails if the device runs out of memory.
    pub fn present(&self) -> Result<Tensor> {
        match &self.ragged {
            None => Tensor::ones((self.sizes.len(), self.width), DType::U8, &self.device),
            Some(r) => Ok(r.present.clone()),
        }
    }
}
