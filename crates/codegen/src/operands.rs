//! What one launch passes, declared once.
//!
//! The kernel's parameter list, the struct the runtime fills, the manifest and the table in the
//! docs all come from the two declarations below, so an order or a type cannot differ between
//! them. Knows nothing of tera, CUDA or modes.

use std::ffi::c_void;
use std::fmt::Write as _;

/// Element type of an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    /// bfloat16.
    Bf16,
    /// IEEE binary32.
    F32,
    /// 32-bit signed integer.
    I32,
    /// The specialisation's state dtype: f32 or bf16.
    State,
    /// [`FaultRecord`].
    Fault,
}

impl Dtype {
    fn c_type(self) -> &'static str {
        match self {
            Dtype::Bf16 => "bf16_bits",
            Dtype::F32 => "float",
            Dtype::I32 => "int",
            Dtype::State => "state_element",
            Dtype::Fault => "FaultRecord",
        }
    }

    /// Name in manifests and documentation.
    pub fn name(self) -> &'static str {
        match self {
            Dtype::Bf16 => "bf16",
            Dtype::F32 => "f32",
            Dtype::I32 => "i32",
            Dtype::State => "state",
            Dtype::Fault => "fault record",
        }
    }
}

/// How the kernel uses an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Never written.
    Read,
    /// Written, never read.
    Write,
    /// Updated in place.
    ReadWrite,
}

impl Access {
    /// Name in manifests and documentation.
    pub fn name(self) -> &'static str {
        match self {
            Access::Read => "read",
            Access::Write => "written",
            Access::ReadWrite => "updated",
        }
    }
}

/// When the kernel touches an operand. The parameter exists in every kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    /// In every launch.
    Always,
    /// With a conv bias; otherwise dt_bias stands in its place, unread.
    WithBias,
    /// In verify steps; otherwise the pointer is 0, unread.
    WithVerify,
    /// In ragged verify steps; otherwise the pointer is 0, unread.
    WithTokenCounts,
    /// In verify steps that keep records; otherwise the pointer is 0, unread.
    WithRecords,
    /// With the low-rank gate; otherwise the pointer is 0, unread.
    WithLowRankGate,
    /// With a projected gate; otherwise the pointer is 0, unread.
    WithProjectedGate,
}

impl Presence {
    /// Name in manifests and documentation.
    pub fn name(self) -> &'static str {
        match self {
            Presence::Always => "always",
            Presence::WithBias => "with bias",
            Presence::WithVerify => "verify",
            Presence::WithTokenCounts => "ragged verify",
            Presence::WithRecords => "verify with records",
            Presence::WithLowRankGate => "low-rank gate",
            Presence::WithProjectedGate => "projected gate",
        }
    }
}

/// One declared pointer operand.
#[derive(Clone, Copy, Debug)]
pub struct Operand {
    /// Parameter name in the kernel and field name in [`Arguments`].
    pub name: &'static str,
    /// Element type.
    pub dtype: Dtype,
    /// Shape, in the documentation's symbols.
    pub shape: &'static str,
    /// The geometry field that holds its outer stride, or "" for a contiguous operand.
    pub stride: &'static str,
    /// Read, written or both.
    pub access: Access,
    /// When it is touched.
    pub presence: Presence,
    /// Required alignment of the pointer, in bytes.
    pub alignment_bytes: usize,
}

/// One parameter of the kernel, in launch order.
#[derive(Clone, Copy, Debug)]
pub enum Parameter {
    /// A device pointer.
    Pointer(Operand),
    /// An f32 passed by value.
    Scalar(&'static str),
    /// The [`Geometry`] struct, by value.
    Geometry,
}

impl Parameter {
    /// Name in the kernel.
    pub fn name(&self) -> &'static str {
        match self {
            Parameter::Pointer(operand) => operand.name,
            Parameter::Scalar(name) => name,
            Parameter::Geometry => "geometry",
        }
    }
}

/// One field of [`Geometry`].
#[derive(Clone, Copy, Debug)]
pub struct GeometryField {
    /// Field name in both languages.
    pub name: &'static str,
    /// Type in the kernel.
    pub c_type: &'static str,
    /// What it holds, with its unit.
    pub doc: &'static str,
}

macro_rules! launch_parameters {
    (@type pointer) => { u64 };
    (@type scalar) => { f32 };
    (@type geometry) => { Geometry };
    (@entry $name:ident pointer $dtype:ident $shape:literal $stride:literal $access:ident $presence:ident $alignment:literal) => {
        Parameter::Pointer(Operand {
            name: stringify!($name),
            dtype: Dtype::$dtype,
            shape: $shape,
            stride: $stride,
            access: Access::$access,
            presence: Presence::$presence,
            alignment_bytes: $alignment,
        })
    };
    (@entry $name:ident scalar) => { Parameter::Scalar(stringify!($name)) };
    (@entry $name:ident geometry) => { Parameter::Geometry };
    (@address pointer $value:expr) => { $value };
    (@address scalar $value:expr) => { 0 };
    (@address geometry $value:expr) => { 0 };
    (@bytes pointer $value:expr) => { $value.to_ne_bytes().to_vec() };
    (@bytes scalar $value:expr) => { $value.to_ne_bytes().to_vec() };
    (@bytes geometry $value:expr) => { $value.to_bytes() };
    ($( $(#[$doc:meta])* $name:ident = $kind:ident ( $($rest:tt)* ); )*) => {
        /// The values of one launch, in launch order. Pointers are device addresses.
        #[derive(Clone, Copy, Debug, Default)]
        #[repr(C)]
        pub struct Arguments {
            $( $(#[$doc])* pub $name: launch_parameters!(@type $kind), )*
        }

        /// Every kernel parameter, in launch order.
        pub const PARAMETERS: &[Parameter] = &[
            $( launch_parameters!(@entry $name $kind $($rest)*), )*
        ];

        /// Number of kernel parameters.
        pub const PARAMETER_COUNT: usize = PARAMETERS.len();

        impl Arguments {
            /// The addresses of the values, in launch order, as `cuLaunchKernelEx` takes them.
            #[inline]
            pub fn addresses(&mut self) -> [*mut c_void; PARAMETER_COUNT] {
                [ $( (&raw mut self.$name).cast(), )* ]
            }

            /// The device address of each parameter, in launch order; 0 for what is none.
            #[inline]
            pub fn pointers(&self) -> [u64; PARAMETER_COUNT] {
                [ $( launch_parameters!(@address $kind self.$name), )* ]
            }

            /// The bytes of each parameter, in launch order, for a launcher that copies them.
            pub fn to_bytes(&self) -> Vec<Vec<u8>> {
                vec![ $( launch_parameters!(@bytes $kind self.$name), )* ]
            }
        }
    };
}

// name = pointer(dtype shape outer-stride access presence alignment)
launch_parameters! {
    /// Packed q, k, v columns of the projection.
    qkv = pointer(Bf16 "[rows, 3 dim]" "qkv_pitch" Read Always 2);
    /// Decode layout of the conv weight.
    conv_weight = pointer(F32 "[3, 4, dim]" "" Read Always 4);
    /// Conv bias, or dt_bias in its place.
    conv_bias = pointer(F32 "[3 dim]" "" Read WithBias 4);
    /// Conv windows, in either layout.
    conv_cache = pointer(Bf16 "[slots, 3 dim, length] or [slots, length, 3 dim]" "conv_slot_stride" ReadWrite Always 2);
    /// F_A columns of the projection.
    f_a = pointer(Bf16 "[rows, 128]" "f_a_pitch" Read WithLowRankGate 2);
    /// Beta columns of the projection.
    beta = pointer(Bf16 "[rows, heads]" "beta_pitch" Read Always 2);
    /// Log of the gate's rate.
    a_log = pointer(F32 "[heads]" "" Read Always 4);
    /// Bias of the gate.
    dt_bias = pointer(F32 "[dim]" "" Read Always 4);
    /// Slots of each request: column 0 is the conv line, column t token t's checkpoint.
    slots = pointer(I32 "[requests, columns]" "slots_stride" Read Always 4);
    /// State pool the step writes: value-major, keys contiguous.
    state_pool = pointer(State "[slots, heads, 128, 128]" "state_slot_stride" ReadWrite Always 16);
    /// Result.
    out = pointer(Bf16 "[rows, dim]" "out_stride" Write Always 2);
    /// Output gate columns of the projection.
    output_gate = pointer(Bf16 "[rows, dim]" "gate_pitch" Read Always 2);
    /// Weight of the output norm.
    norm = pointer(F32 "[128]" "" Read Always 4);
    /// Lower bound of the log decay; unread with the softplus gate.
    lower_bound = scalar();
    /// Factor of q: 128^-1/2.
    scale = scalar();
    /// Epsilon of the output norm.
    eps = scalar();
    /// Up-projection of the gate.
    f_b = pointer(Bf16 "[dim, 128]" "" Read WithLowRankGate 16);
    /// Gate input that was projected before: F_B F_A, rounded.
    gate_input = pointer(Bf16 "[rows, dim]" "gate_input_pitch" Read WithProjectedGate 2);
    /// Tokens of the previous step that were accepted.
    accepted = pointer(I32 "[requests]" "" Read WithVerify 4);
    /// State pool the step reads; the same address as `state_pool` updates in place.
    state_source = pointer(State "[slots, heads, 128, 128]" "source_slot_stride" Read Always 16);
    /// Tokens each request brings, 0 to the step's.
    token_counts = pointer(I32 "[requests]" "" Read WithTokenCounts 4);
    /// What the delta rule did in each token after the first: decay, k, u.
    records = pointer(F32 "[slots, records, heads, 3, 128]" "record_slot_stride" ReadWrite WithRecords 16);
    /// Fault record of this prepared object.
    faults = pointer(Fault "[1]" "" ReadWrite Always 8);
    /// Strides and counts.
    geometry = geometry();
}

macro_rules! geometry {
    (@c i64) => { "i64" };
    (@c i32) => { "int" };
    ($( $name:ident: $type:ident = $doc:literal; )*) => {
        /// Strides in elements and counts, one struct parameter of the kernel.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[repr(C)]
        pub struct Geometry {
            $( #[doc = $doc] pub $name: $type, )*
        }

        /// The fields of [`Geometry`], in order.
        pub const GEOMETRY: &[GeometryField] = &[
            $( GeometryField { name: stringify!($name), c_type: geometry!(@c $type), doc: $doc }, )*
        ];

        impl Geometry {
            fn to_bytes(self) -> Vec<u8> {
                let mut bytes = Vec::with_capacity(size_of::<Self>());
                $( bytes.extend_from_slice(&self.$name.to_ne_bytes()); )*
                // 64-bit fields come first, so the only padding is at the end.
                bytes.resize(size_of::<Self>(), 0);
                bytes
            }
        }
    };
}

geometry! {
    qkv_pitch: i64 = "Elements between rows of the q, k, v columns.";
    gate_pitch: i64 = "Elements between rows of the output gate columns.";
    f_a_pitch: i64 = "Elements between rows of the F_A columns.";
    gate_input_pitch: i64 = "Elements between rows of the projected gate input.";
    beta_pitch: i64 = "Elements between rows of the beta columns.";
    out_stride: i64 = "Elements between rows of the output.";
    slots_stride: i64 = "Elements between rows of the slot table.";
    conv_slot_stride: i64 = "Elements between slots of the conv cache.";
    state_slot_stride: i64 = "Elements between slots of the written state pool.";
    source_slot_stride: i64 = "Elements between slots of the read state pool.";
    record_slot_stride: i64 = "Elements between slots of the record pool.";
    conv_length: i32 = "Positions of one conv line.";
    pool_slots: i32 = "Slots of the pools; a slot value at or above it is a fault.";
    columns: i32 = "Columns of the slot table, or records of a slot and 1; an accepted count above it is a fault.";
    requests: i32 = "Requests of the launch.";
}

/// What one launch of a reset passes, declared once.
pub mod reset {
    use super::{Access, Dtype, GeometryField, Operand, Parameter, Presence};
    use std::ffi::c_void;

    launch_parameters! {
        /// Slots to zero, every column of every row.
        slots = pointer(I32 "[requests, columns]" "slots_stride" Read Always 4);
        /// State pool: value-major, keys contiguous.
        state_pool = pointer(State "[slots, heads, 128, 128]" "state_slot_stride" Write Always 16);
        /// Conv windows, in either layout.
        conv_cache = pointer(Bf16 "[slots, 3 dim, length] or [slots, length, 3 dim]" "conv_slot_stride" Write Always 2);
        /// Strides and counts.
        geometry = geometry();
    }

    geometry! {
        slots_stride: i64 = "Elements between rows of the slot table.";
        conv_slot_stride: i64 = "Elements between slots of the conv cache.";
        state_slot_stride: i64 = "Elements between slots of the state pool.";
        conv_length: i32 = "Positions of one conv line.";
        pool_slots: i32 = "Slots of the pools; a slot value at or above it is skipped.";
    }
}

/// What the kernel reports about requests it refused; lives in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct FaultRecord {
    /// `request << 32 | kind` of the lowest faulted request; all ones when none faulted.
    pub first: u64,
    /// Faulted requests since the last reset.
    pub count: u32,
    /// Zero.
    pub reserved: u32,
}

impl FaultRecord {
    /// The record before any fault.
    pub const CLEAR: FaultRecord = FaultRecord {
        first: u64::MAX,
        count: 0,
        reserved: 0,
    };
}

/// The kernel's parameter list as CUDA text.
pub(crate) fn c_parameters(parameters: &[Parameter]) -> String {
    let mut text = String::new();
    for (i, parameter) in parameters.iter().enumerate() {
        if i > 0 {
            text.push_str(", \\\n");
        }
        match parameter {
            Parameter::Pointer(operand) => {
                let constant = if operand.access == Access::Read {
                    "const "
                } else {
                    ""
                };
                let _ = write!(
                    text,
                    "    {constant}{}* {}",
                    operand.dtype.c_type(),
                    operand.name
                );
            }
            Parameter::Scalar(name) => {
                let _ = write!(text, "    float {name}");
            }
            Parameter::Geometry => {
                text.push_str("    const __grid_constant__ KdaGeometry geometry")
            }
        }
    }
    text
}

/// The fields of `KdaGeometry` as CUDA text.
pub(crate) fn c_geometry(fields: &[GeometryField]) -> String {
    let mut text = String::new();
    for (i, field) in fields.iter().enumerate() {
        if i > 0 {
            text.push('\n');
        }
        let _ = write!(text, "    {} {};", field.c_type, field.name);
    }
    text
}

/// The operand table of the documentation, in Markdown.
pub fn markdown_table() -> String {
    let mut text = String::from(
        "| # | parameter | dtype | shape | outer stride | access | present | alignment (bytes) |\n\
         | --: | --- | --- | --- | --- | --- | --- | --: |\n",
    );
    for (i, parameter) in PARAMETERS.iter().enumerate() {
        let _ = match parameter {
            Parameter::Pointer(o) => writeln!(
                text,
                "| {i} | `{}` | {} | {} | {} | {} | {} | {} |",
                o.name,
                o.dtype.name(),
                o.shape,
                if o.stride.is_empty() {
                    "contiguous".into()
                } else {
                    format!("`{}`", o.stride)
                },
                o.access.name(),
                o.presence.name(),
                o.alignment_bytes
            ),
            Parameter::Scalar(name) => {
                writeln!(
                    text,
                    "| {i} | `{name}` | f32 | by value | | read | always | |"
                )
            }
            Parameter::Geometry => {
                writeln!(
                    text,
                    "| {i} | `geometry` | struct | by value | | read | always | |"
                )
            }
        };
    }
    text
}
