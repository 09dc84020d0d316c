//! One rank's part of the model, and its gradients as the data-parallel sum sees them.

use crate::Real;
use crate::arrivals::Arrivals;
use crate::cpu::kernels::{fill, squares};
use crate::pass::Workspace;
use crate::shape::Shape;
use crate::team::Team;
use reknit_layout::job::ModelSpec;
use reknit_layout::{Axis, Family, Units};
use std::collections::BTreeMap;
use std::mem;
use std::ops::Range;
use std::sync::Arc;

/// Weights, gradients and both Adam moments of one rank's units and of the replicated parameters.
#[derive(Debug)]
pub struct Shard<T> {
    pub(crate) model: ModelSpec,
    pub(crate) shape: Shape,
    pub(crate) owned: BTreeMap<Axis, Units>,
    /// By layer.
    pub(crate) attn: Vec<AxisShard<T>>,
    /// By layer.
    pub(crate) ffn: Vec<AxisShard<T>>,
    pub(crate) vocab: AxisShard<T>,
    pub(crate) replicated: Tensor<T>,
    pub(crate) replicated_gradients: Vec<T>,
    pub(crate) team: Arc<Team>,
    /// What it waits for, if it shall become another shard.
    pub(crate) arrivals: Option<Arrivals>,
    /// Activations, kept from one step to the next to spare the allocations.
    pub(crate) workspace: Workspace<T>,
    /// No batch has been computed since the layout changed.
    pub(crate) just_adopted: bool,
}

/// The owned units of one axis, in ascending order.
#[derive(Debug)]
pub(crate) struct AxisShard<T> {
    pub(crate) units: Units,
    pub(crate) input: Tensor<T>,
    pub(crate) output: Tensor<T>,
    /// Input rows of all units, then output rows of all units: one buffer, so that it can be moved out and back.
    pub(crate) gradients: Vec<T>,
}

/// A parameter matrix with its moments: rows of owned units, row-major.
#[derive(Debug)]
pub(crate) struct Tensor<T> {
    /// Values of one unit.
    pub(crate) unit_len: usize,
    pub(crate) weights: Vec<T>,
    pub(crate) first_moments: Vec<T>,
    pub(crate) second_moments: Vec<T>,
}

/// Why a shard could not do what it was asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ShardError {
    #[error("unit {unit} of {axis} is not on this rank, which owns {owned} there")]
    NotOwned { axis: Axis, unit: u32, owned: Units },
    #[error("{axis} units {units}: {got} gradient values given, {expected} needed")]
    Length { axis: Axis, units: Units, got: usize, expected: usize },
    #[error("{got} replicated gradient values given, {expected} needed")]
    ReplicatedLength { got: usize, expected: usize },
    #[error("the replicated parameters have not come to this rank yet")]
    NotCome,
}

impl<T: Real> Tensor<T> {
    pub(crate) fn zeros(units: usize, unit_len: usize) -> Self {
        let zeros = || vec![T::ZERO; units * unit_len];
        Self { unit_len, weights: zeros(), first_moments: zeros(), second_moments: zeros() }
    }

    pub(crate) fn len(&self) -> usize {
        self.weights.len()
    }

    /// Where the unit stored as number `position` lies in each buffer.
    pub(crate) fn place(&self, position: usize) -> Range<usize> {
        position * self.unit_len..(position + 1) * self.unit_len
    }

    /// What a reshard moves, in the order in which it travels.
    pub(crate) fn state(&self) -> [&Vec<T>; 3] {
        [&self.weights, &self.first_moments, &self.second_moments]
    }

    pub(crate) fn state_mut(&mut self) -> [&mut Vec<T>; 3] {
        [&mut self.weights, &mut self.first_moments, &mut self.second_moments]
    }
}

impl<T: Real> AxisShard<T> {
    pub(crate) fn zeros(shape: &Shape, family: Family, units: Units) -> Self {
        let (input, output) = shape.unit_rows(family);
        let count = units.len() as usize;
        Self {
            input: Tensor::zeros(count, input * shape.hidden),
            output: Tensor::zeros(count, output * shape.hidden),
            gradients: vec![T::ZERO; count * (input + output) * shape.hidden],
            units,
        }
    }

    pub(crate) fn unit_len(&self) -> usize {
        self.input.unit_len + self.output.unit_len
    }

    pub(crate) fn tensors(&self) -> [&Tensor<T>; 2] {
        [&self.input, &self.output]
    }

    /// Values of all units.
    pub(crate) fn len(&self) -> usize {
        self.input.len() + self.output.len()
    }

    /// Matrices and gradients side by side: the input rows', then the output rows'.
    pub(crate) fn with_gradients(&mut self) -> [(&mut Tensor<T>, &mut [T]); 2] {
        let (of_input, of_output) = self.gradients.split_at_mut(self.input.len());
        [(&mut self.input, of_input), (&mut self.output, of_output)]
    }
}

impl<T: Real> Shard<T> {
    /// A shard of zeros. Axes and units that the model does not have are left out.
    pub(crate) fn zeros(model: &ModelSpec, owned: &BTreeMap<Axis, Units>) -> Self {
        let shape = Shape::new(model);
        let axes = model.axes();
        let owned: BTreeMap<Axis, Units> = owned
            .iter()
            .filter(|(axis, _)| axes.contains(axis))
            .map(|(&axis, units)| {
                let all = Units::range(0, model.units(axis.family));
                (axis, units.intersection(&all))
            })
            .collect();
        let axis_shard = |axis: Axis| {
            let units = owned.get(&axis).cloned().unwrap_or_default();
            AxisShard::zeros(&shape, axis.family, units)
        };
        Self {
            attn: (0..model.layers).map(|layer| axis_shard(Axis::attn(layer))).collect(),
            ffn: (0..model.layers).map(|layer| axis_shard(Axis::ffn(layer))).collect(),
            vocab: axis_shard(Axis::vocab()),
            replicated: Tensor::zeros(1, shape.replicated_len()),
            replicated_gradients: vec![T::ZERO; shape.replicated_len()],
            model: model.clone(),
            shape,
            owned,
            team: Team::alone(),
            arrivals: None,
            workspace: Workspace::default(),
            just_adopted: true,
        }
    }

    /// The threads that compute, instead of the caller's alone. No result depends on how many they are.
    pub fn set_team(&mut self, team: Arc<Team>) {
        self.team = team;
    }

    pub fn owned(&self) -> &BTreeMap<Axis, Units> {
        &self.owned
    }

    /// Parameters of one unit.
    pub fn unit_len(model: &ModelSpec, family: Family) -> usize {
        Self::unit_parts(model, family).iter().sum()
    }

    /// Parameters of one unit's input rows, and of its output rows.
    pub fn unit_parts(model: &ModelSpec, family: Family) -> [usize; 2] {
        let shape = Shape::new(model);
        let (input, output) = shape.unit_rows(family);
        [input * shape.hidden, output * shape.hidden]
    }

    pub(crate) fn axis(&self, axis: Axis) -> Option<&AxisShard<T>> {
        match (axis.family, axis.layer) {
            (Family::Attn, Some(layer)) => self.attn.get(layer as usize),
            (Family::Ffn, Some(layer)) => self.ffn.get(layer as usize),
            (Family::Vocab, None) => Some(&self.vocab),
            (Family::Attn | Family::Ffn, None) | (Family::Vocab, Some(_)) => None,
        }
    }

    pub(crate) fn axis_mut(&mut self, axis: Axis) -> Option<&mut AxisShard<T>> {
        match (axis.family, axis.layer) {
            (Family::Attn, Some(layer)) => self.attn.get_mut(layer as usize),
            (Family::Ffn, Some(layer)) => self.ffn.get_mut(layer as usize),
            (Family::Vocab, None) => Some(&mut self.vocab),
            (Family::Attn | Family::Ffn, None) | (Family::Vocab, Some(_)) => None,
        }
    }

    /// In the order of [`ModelSpec::axes`].
    pub(crate) fn axes_mut(&mut self) -> impl Iterator<Item = &mut AxisShard<T>> {
        let layered = self.attn.iter_mut().zip(&mut self.ffn).flat_map(|(attn, ffn)| [attn, ffn]);
        layered.chain([&mut self.vocab])
    }

    /// Where each of the units is stored on this rank.
    pub(crate) fn positions(&self, axis: Axis, units: &Units) -> Result<Vec<usize>, ShardError> {
        let owned = self.axis(axis).map(|shard| &shard.units);
        let position = |unit| {
            let found = owned.and_then(|owned| owned.position(unit));
            found.map(|position| position as usize).ok_or_else(|| ShardError::NotOwned {
                axis,
                unit,
                owned: owned.cloned().unwrap_or_default(),
            })
        };
        units.iter().map(position).collect()
    }

    /// All gradients are zero, and those that were taken out are back.
    pub fn zero_gradients(&mut self) {
        let team = Arc::clone(&self.team);
        let zero = |gradients: &mut Vec<T>, len| {
            gradients.resize(len, T::ZERO);
            fill(&team, gradients, T::ZERO);
        };
        for axis in self.axes_mut() {
            let len = axis.len();
            zero(&mut axis.gradients, len);
        }
        zero(&mut self.replicated_gradients, self.shape.replicated_len());
    }

    /// Moves the axis' gradients out: input rows of all owned units, ascending, then output rows of all owned units.
    /// Empty when this rank owns nothing there or the gradients are out already.
    ///
    /// Until they are put back (or [`Shard::zero_gradients`] makes new ones), nothing else may be asked of them: no
    /// pass, no norm, no step of the optimizer.
    pub fn take_gradients(&mut self, axis: Axis) -> Vec<T> {
        self.axis_mut(axis).map(|shard| mem::take(&mut shard.gradients)).unwrap_or_default()
    }

    /// Moves the axis' gradients in, in the order of [`Shard::take_gradients`].
    ///
    /// # Errors
    /// The length is wrong; no gradient has changed then.
    pub fn put_gradients(&mut self, axis: Axis, values: Vec<T>) -> Result<(), ShardError> {
        let expected = self.axis(axis).map_or(0, AxisShard::len);
        if values.len() != expected {
            let units = self.owned.get(&axis).cloned().unwrap_or_default();
            return Err(ShardError::Length { axis, units, got: values.len(), expected });
        }
        if let Some(shard) = self.axis_mut(axis) {
            shard.gradients = values;
        }
        Ok(())
    }

    /// Moves the gradients of the replicated parameters out; see [`Shard::take_gradients`].
    pub fn take_replicated_gradients(&mut self) -> Vec<T> {
        mem::take(&mut self.replicated_gradients)
    }

    /// Moves the gradients of the replicated parameters in.
    ///
    /// # Errors
    /// The length is wrong; no gradient has changed then.
    pub fn put_replicated_gradients(&mut self, values: Vec<T>) -> Result<(), ShardError> {
        let (got, expected) = (values.len(), self.shape.replicated_len());
        if got != expected {
            return Err(ShardError::ReplicatedLength { got, expected });
        }
        self.replicated_gradients = values;
        Ok(())
    }

    /// The axis' gradients, in the order of [`Shard::take_gradients`].
    pub fn gradients(&self, axis: Axis) -> &[T] {
        self.axis(axis).map_or(&[], |shard| &shard.gradients)
    }

    /// Gradients of the replicated parameters. The same bits on every rank of a tensor-parallel group, if all of them saw the same batches.
    pub fn replicated_gradients(&self) -> &[T] {
        &self.replicated_gradients
    }

    /// The sum of the squared gradients of the owned units, and of the replicated parameters if asked (one rank of a
    /// group should): axis by axis in the order of [`ModelSpec::axes`], and last the replicated ones.
    pub fn gradient_norm_squared(&self, include_replicated: bool) -> f64 {
        let axes = self.attn.iter().zip(&self.ffn).flat_map(|(attn, ffn)| [attn, ffn]).chain([&self.vocab]);
        let replicated = if include_replicated { self.replicated_norm_squared() } else { 0.0 };
        axes.map(|axis| squares(&self.team, &axis.gradients)).sum::<f64>() + replicated
    }

    /// The sum of the squared gradients of the owned units of one axis.
    pub fn axis_norm_squared(&self, axis: Axis) -> f64 {
        self.axis(axis).map_or(0.0, |shard| squares(&self.team, &shard.gradients))
    }

    /// The sum of the squared gradients of the replicated parameters.
    pub fn replicated_norm_squared(&self) -> f64 {
        squares(&self.team, &self.replicated_gradients)
    }
}
