//! Buffers that an operation owns while it runs.

/// A typed buffer, moved into an operation and given back by [`crate::Work::wait`].
#[derive(Debug, Clone, PartialEq)]
pub enum Buffer {
    F32(Vec<f32>),
    F64(Vec<f64>),
    Bytes(Vec<u8>),
}

/// A number that can be reduced over ranks.
pub trait Element: bytemuck::Pod + Send + Sync + PartialOrd + std::ops::AddAssign + std::fmt::Debug {
    fn wrap(values: Vec<Self>) -> Buffer;
    /// `None` when the buffer is of another type.
    fn unwrap(buffer: Buffer) -> Option<Vec<Self>>;
}

impl Element for f32 {
    fn wrap(values: Vec<Self>) -> Buffer {
        Buffer::F32(values)
    }

    fn unwrap(buffer: Buffer) -> Option<Vec<Self>> {
        match buffer {
            Buffer::F32(values) => Some(values),
            Buffer::F64(_) | Buffer::Bytes(_) => None,
        }
    }
}

impl Element for f64 {
    fn wrap(values: Vec<Self>) -> Buffer {
        Buffer::F64(values)
    }

    fn unwrap(buffer: Buffer) -> Option<Vec<Self>> {
        match buffer {
            Buffer::F64(values) => Some(values),
            Buffer::F32(_) | Buffer::Bytes(_) => None,
        }
    }
}

/// The type of a buffer's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    F32,
    F64,
    Bytes,
}

impl Kind {
    /// Bytes per element.
    pub fn width(self) -> usize {
        match self {
            Kind::F32 => 4,
            Kind::F64 => 8,
            Kind::Bytes => 1,
        }
    }
}

impl Buffer {
    pub fn empty() -> Buffer {
        Buffer::Bytes(Vec::new())
    }

    /// Empty when its elements are numbers.
    pub(crate) fn into_bytes(self) -> Vec<u8> {
        match self {
            Buffer::Bytes(bytes) => bytes,
            Buffer::F32(_) | Buffer::F64(_) => Vec::new(),
        }
    }

    pub fn kind(&self) -> Kind {
        match self {
            Buffer::F32(_) => Kind::F32,
            Buffer::F64(_) => Kind::F64,
            Buffer::Bytes(_) => Kind::Bytes,
        }
    }

    /// In elements.
    pub fn len(&self) -> usize {
        match self {
            Buffer::F32(values) => values.len(),
            Buffer::F64(values) => values.len(),
            Buffer::Bytes(values) => values.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements' memory, in this machine's byte order.
    pub fn as_bytes(&self) -> &[u8] {
        match self {
            Buffer::F32(values) => bytemuck::cast_slice(values),
            Buffer::F64(values) => bytemuck::cast_slice(values),
            Buffer::Bytes(values) => values,
        }
    }

    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Buffer::F32(values) => bytemuck::cast_slice_mut(values),
            Buffer::F64(values) => bytemuck::cast_slice_mut(values),
            Buffer::Bytes(values) => values,
        }
    }
}
