//! Buffers that an operation owns while it runs.

/// A typed buffer, moved into an operation and given back by [`crate::Work::wait`].
#[derive(Debug, Clone, PartialEq)]
pub enum Buffer {
    F32(Vec<f32>),
    F64(Vec<f64>),
    Bytes(Vec<u8>),
}

/// A number that can be reduced over ranks.
pub trait Element:
    bytemuck::Pod + Send + Sync + PartialOrd + std::ops::AddAssign + std::fmt::Debug
{
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
