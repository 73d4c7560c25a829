//! Splits PTX text into tokens with their lines. Knows no instruction.

use crate::error::Error;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A name, directive, opcode or register, dots and `::` included.
    Word(String),
    /// A number, as written, without its sign.
    Number(String),
    Text(String),
    Punct(char),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Token {
    pub(crate) kind: Kind,
    pub(crate) line: u32,
}

impl Token {
    pub(crate) fn is(&self, c: char) -> bool {
        self.kind == Kind::Punct(c)
    }

    pub(crate) fn word(&self) -> Option<&str> {
        match &self.kind {
            Kind::Word(w) => Some(w),
            _ => None,
        }
    }

    pub(crate) fn text(&self) -> String {
        match &self.kind {
            Kind::Word(w) | Kind::Number(w) => w.clone(),
            Kind::Text(t) => format!("\"{t}\""),
            Kind::Punct(c) => c.to_string(),
        }
    }
}

/// Directives that end with their line and mean nothing to execution.
const LINE_DIRECTIVES: [&str; 5] = [".loc", ".file", ".version", ".target", ".address_size"];

fn in_word(c: u8) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, b'_' | b'$' | b'.' | b'%')
}

pub(crate) fn tokens(source: &str) -> Result<Vec<Token>, Error> {
    let mut out = Vec::new();
    let mut in_comment = false;
    for (number, full) in source.lines().enumerate() {
        let line = number as u32 + 1;
        let first = full.split_whitespace().next().unwrap_or("");
        if !in_comment && LINE_DIRECTIVES.contains(&first) {
            continue;
        }
        let bytes = full.as_bytes();
        let mut i = 0;
        while i < bytes.len() {
            let rest = &bytes[i..];
            if in_comment {
                if rest.starts_with(b"*/") {
                    in_comment = false;
                    i += 1;
                }
                i += 1;
            } else if rest[0].is_ascii_whitespace() || rest[0] == 0 {
                i += 1;
            } else if rest.starts_with(b"//") {
                break;
            } else if rest.starts_with(b"/*") {
                in_comment = true;
                i += 2;
            } else if rest[0] == b'"' {
                let Some(len) = rest[1..].iter().position(|&c| c == b'"') else {
                    return Err(Error::Syntax {
                        line,
                        text: full.to_string(),
                        expected: "a closing quote",
                    });
                };
                let text = String::from_utf8_lossy(&rest[1..=len]).into_owned();
                out.push(Token {
                    kind: Kind::Text(text),
                    line,
                });
                i += len + 2;
            } else if in_word(rest[0]) {
                let mut len = 0;
                while len < rest.len() && (in_word(rest[len]) || rest[len..].starts_with(b"::")) {
                    len += if rest[len] == b':' { 2 } else { 1 };
                }
                let word = String::from_utf8_lossy(&rest[..len]).into_owned();
                let kind = if rest[0].is_ascii_digit() {
                    Kind::Number(word)
                } else {
                    Kind::Word(word)
                };
                out.push(Token { kind, line });
                i += len;
            } else if rest[0].is_ascii_punctuation() {
                out.push(Token {
                    kind: Kind::Punct(rest[0] as char),
                    line,
                });
                i += 1;
            } else {
                return Err(Error::Syntax {
                    line,
                    text: full.to_string(),
                    expected: "PTX text",
                });
            }
        }
    }
    Ok(out)
}

/// An integer as PTX writes it, or the bits of a `0f` or `0d` float.
pub(crate) fn number(text: &str) -> Option<u64> {
    let lower = text.to_ascii_lowercase();
    let plain = lower
        .strip_suffix('u')
        .filter(|t| !t.starts_with("0f") && !t.starts_with("0d"))
        .unwrap_or(&lower);
    if let Some(hex) = plain.strip_prefix("0x") {
        return u64::from_str_radix(hex, 16).ok();
    }
    if let Some(bits) = plain.strip_prefix("0f") {
        return (bits.len() == 8)
            .then(|| u64::from_str_radix(bits, 16).ok())
            .flatten();
    }
    if let Some(bits) = plain.strip_prefix("0d") {
        return (bits.len() == 16)
            .then(|| u64::from_str_radix(bits, 16).ok())
            .flatten();
    }
    if let Some(bits) = plain.strip_prefix("0b") {
        return u64::from_str_radix(bits, 2).ok();
    }
    if plain.len() > 1 && plain.starts_with('0') {
        return u64::from_str_radix(plain, 8).ok();
    }
    plain.parse().ok()
}
