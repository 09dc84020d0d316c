//! What is said of a GPU's health, as four messages carry it.

use crate::v1::{Gpu, GpuHealthChanged, HealthClass, HealthTransition, HealthVerdict, NodeGpu};

static NOTHING: HealthVerdict = HealthVerdict {
    health: HealthClass::Unspecified as i32,
    cause: String::new(),
    evidence: String::new(),
    shards_readable: false,
    rejoin: String::new(),
    action: String::new(),
    would_be: HealthClass::Unspecified as i32,
};

macro_rules! carries_a_verdict {
    ($($message:ty),*) => {$(
        impl $message {
            /// What is said of the GPU's health; one that says nothing where there is none.
            #[must_use]
            pub fn verdict(&self) -> &HealthVerdict {
                self.verdict.as_ref().unwrap_or(&NOTHING)
            }

            #[must_use]
            pub fn health(&self) -> HealthClass {
                self.verdict().health()
            }
        }
    )*};
}

carries_a_verdict!(Gpu, HealthTransition, NodeGpu, GpuHealthChanged);
