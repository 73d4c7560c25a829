//! Owns the errors of this crate; must not know how a step is computed.

use std::fmt;

/// Why operands do not describe a KDA step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// An operand holds fewer elements than the shape reaches.
    OperandTooShort {
        /// Operand name.
        operand: &'static str,
        /// Elements found.
        found: usize,
        /// Elements needed.
        needed: usize,
    },
    /// A row or slot stride is smaller than what one row or slot occupies.
    StrideTooSmall {
        /// Operand name.
        operand: &'static str,
        /// Stride in elements.
        stride: usize,
        /// Elements needed.
        needed: usize,
    },
    /// A convolution line has no room for the window and the drafts.
    ConvLineTooShort {
        /// Positions found.
        conv_len: usize,
        /// Positions needed.
        needed: usize,
    },
    /// Fewer slot columns than tokens.
    ColumnsTooFew {
        /// Columns found.
        columns: usize,
        /// Tokens of the step.
        tokens: usize,
    },
    /// Fewer records a slot than tokens after the first.
    RecordsTooFew {
        /// Records found.
        records: usize,
        /// Tokens of the step.
        tokens: usize,
    },
    /// A count that must be at least 1 is 0.
    Zero {
        /// Name of the count.
        count: &'static str,
    },
    /// A convolution weight whose length is not 3 · heads · 128 · 4.
    ConvWeightLength {
        /// Elements found.
        found: usize,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Error::OperandTooShort {
                operand,
                found,
                needed,
            } => {
                write!(f, "{operand} holds {found} elements, needed {needed}")
            }
            Error::StrideTooSmall {
                operand,
                stride,
                needed,
            } => {
                write!(
                    f,
                    "stride of {operand} is {stride} elements, needed {needed}"
                )
            }
            Error::ConvLineTooShort { conv_len, needed } => {
                write!(f, "conv line holds {conv_len} positions, needed {needed}")
            }
            Error::ColumnsTooFew { columns, tokens } => {
                write!(f, "slots has {columns} columns, needed {tokens}")
            }
            Error::RecordsTooFew { records, tokens } => {
                write!(f, "records has {records} a slot, needed {}", tokens - 1)
            }
            Error::Zero { count } => write!(f, "{count} is 0, needed 1 or more"),
            Error::ConvWeightLength { found } => {
                write!(
                    f,
                    "conv weight holds {found} elements, needed a multiple of 1536"
                )
            }
        }
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::Error;

    #[test]
    fn texts() {
        let text = |e: Error| e.to_string();
        assert_eq!(
            text(Error::OperandTooShort {
                operand: "out",
                found: 1,
                needed: 2
            }),
            "out holds 1 elements, needed 2"
        );
        assert_eq!(
            text(Error::StrideTooSmall {
                operand: "projected",
                stride: 640,
                needed: 641
            }),
            "stride of projected is 640 elements, needed 641"
        );
        assert_eq!(
            text(Error::ConvLineTooShort {
                conv_len: 3,
                needed: 6
            }),
            "conv line holds 3 positions, needed 6"
        );
        assert_eq!(
            text(Error::ColumnsTooFew {
                columns: 1,
                tokens: 2
            }),
            "slots has 1 columns, needed 2"
        );
        assert_eq!(
            text(Error::Zero { count: "heads" }),
            "heads is 0, needed 1 or more"
        );
        assert_eq!(
            text(Error::ConvWeightLength { found: 7 }),
            "conv weight holds 7 elements, needed a multiple of 1536"
        );
    }
}
