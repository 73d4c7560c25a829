//! Owns what a failed check says; must not know how checks are made.

use std::fmt;

/// The requirement that an operand broke.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Requirement {
    /// A value lies within its bound of the oracle's.
    Accurate,
    /// No value is NaN.
    NotNan,
    /// A copy is exact.
    Exact,
    /// A byte that the launch must not write keeps its value.
    Untouched,
    /// An output row without a live request is +0.
    NullRow,
    /// The fault record counts the requests at fault and names the first.
    Faults,
    /// Two launches give the same bits.
    Identical,
    /// The launch succeeds.
    Runs,
    /// Generated cases reach every value of every dimension.
    Covered,
}

impl fmt::Display for Requirement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Requirement::Accurate => "not within its bound",
            Requirement::NotNan => "NaN",
            Requirement::Exact => "not copied exactly",
            Requirement::Untouched => "changed a byte it must not write",
            Requirement::NullRow => "null row is not +0",
            Requirement::Faults => "wrong fault record",
            Requirement::Identical => "bits differ",
            Requirement::Runs => "did not run",
            Requirement::Covered => "not covered",
        })
    }
}

/// The first place where a check failed.
#[derive(Clone, Debug)]
pub struct Mismatch {
    /// Operand name, or what stands for it ("faults", "launch").
    pub operand: &'static str,
    /// What it broke.
    pub requirement: Requirement,
    /// Request in the batch, where one is concerned.
    pub request: Option<u32>,
    /// Token of the request.
    pub token: Option<u32>,
    /// Head.
    pub head: Option<u32>,
    /// Indices, in words.
    pub place: String,
    /// Value wanted (a byte value where bytes are compared).
    pub expected: f64,
    /// Value found.
    pub found: f64,
    /// Largest difference allowed.
    pub bound: f64,
    /// Number of the case in its run; 0 outside one.
    pub number: u32,
    /// Case, executor and mode, so that the failure can be replayed.
    pub context: String,
}

impl Mismatch {
    /// A mismatch of one operand, with the rest empty.
    pub fn new(operand: &'static str, requirement: Requirement) -> Mismatch {
        Mismatch {
            operand,
            requirement,
            request: None,
            token: None,
            head: None,
            place: String::new(),
            expected: 0.0,
            found: 0.0,
            bound: 0.0,
            number: 0,
            context: String::new(),
        }
    }

    /// Sets the request.
    pub fn request(mut self, request: usize) -> Mismatch {
        self.request = Some(request as u32);
        self
    }

    /// Sets the token.
    pub fn token(mut self, token: usize) -> Mismatch {
        self.token = Some(token as u32);
        self
    }

    /// Sets the head.
    pub fn head(mut self, head: usize) -> Mismatch {
        self.head = Some(head as u32);
        self
    }

    /// Sets the indices, in words.
    pub fn at(mut self, place: impl Into<String>) -> Mismatch {
        self.place = place.into();
        self
    }

    /// Sets the values compared.
    pub fn values(mut self, expected: f64, found: f64, bound: f64) -> Mismatch {
        (self.expected, self.found, self.bound) = (expected, found, bound);
        self
    }

    /// Sets the number of the case.
    pub fn numbered(mut self, number: u64) -> Mismatch {
        self.number = number.try_into().unwrap_or(u32::MAX);
        self
    }

    /// Adds to the context, outermost first.
    pub fn within(mut self, context: impl fmt::Display) -> Mismatch {
        self.context = if self.context.is_empty() {
            context.to_string()
        } else {
            format!("{context}; {}", self.context)
        };
        self
    }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.operand, self.requirement)?;
        let indices = [
            ("request", self.request),
            ("token", self.token),
            ("head", self.head),
        ];
        for (name, index) in indices {
            if let Some(index) = index {
                write!(f, ", {name} {index}")?;
            }
        }
        if !self.place.is_empty() {
            write!(f, ", {}", self.place)?;
        }
        match self.requirement {
            Requirement::Runs | Requirement::Covered => {}
            _ => write!(
                f,
                ": expected {:e}, found {:e}, bound {:e}",
                self.expected, self.found, self.bound
            )?,
        }
        if !self.context.is_empty() {
            write!(f, " [{}]", self.context)?;
        }
        Ok(())
    }
}

impl std::error::Error for Mismatch {}
