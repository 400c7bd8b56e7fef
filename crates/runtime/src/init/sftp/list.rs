//! Lines as `ls -l` writes them, which clients of SFTP show as they are.
//!
//! Pure. Called by the server in `mod.rs`.

use super::wire::Attrs;
use crate::init::DEFAULT_USER;

/// The line of an entry with so many links.
pub(super) fn line(name: &[u8], attrs: &Attrs, links: u64) -> Vec<u8> {
    let (user, group) = attrs.owner.unwrap_or_default();
    let head = format!(
        "{} {links:>3} {:<8} {:<8} {:>8} {} ",
        mode(attrs.mode.unwrap_or(0)),
        known(user),
        known(group),
        attrs.size.unwrap_or(0),
        date(attrs.times.unwrap_or_default().1),
    );
    [head.as_bytes(), name].concat()
}

/// The two users that every sandbox has by name, others by number.
fn known(id: u32) -> String {
    match id {
        0 => "root".to_owned(),
        DEFAULT_USER => "vercel-sandbox".to_owned(),
        other => other.to_string(),
    }
}

fn mode(mode: u32) -> String {
    let kind = match mode & libc::S_IFMT {
        libc::S_IFDIR => 'd',
        libc::S_IFLNK => 'l',
        libc::S_IFCHR => 'c',
        libc::S_IFBLK => 'b',
        libc::S_IFIFO => 'p',
        libc::S_IFSOCK => 's',
        _ => '-',
    };
    let special = [(0o4000, 6, 's'), (0o2000, 3, 's'), (0o1000, 0, 't')];
    let mut out = String::from(kind);
    for (bit, shift, letter) in special {
        let rights = (mode >> shift) & 7;
        out.push(if rights & 4 == 0 { '-' } else { 'r' });
        out.push(if rights & 2 == 0 { '-' } else { 'w' });
        out.push(match (rights & 1 != 0, mode & bit != 0) {
            (true, true) => letter,
            (false, true) => letter.to_ascii_uppercase(),
            (true, false) => 'x',
            (false, false) => '-',
        });
    }
    out
}

/// Day, month and year, UTC, in twelve characters.
fn date(seconds: u32) -> String {
    const MONTHS: [&str; 12] =
        ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    // The civil calendar from a count of days: years that begin in March, in eras of 400.
    let days = u64::from(seconds) / 86_400 + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let of_month = day - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = year + era * 400 + u64::from(month <= 2);
    let name = MONTHS[usize::try_from(month - 1).unwrap_or(0) % 12];
    format!("{name} {of_month:>2}  {year}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_civil() {
        assert_eq!(date(0), "Jan  1  1970");
        assert_eq!(date(951_782_400), "Feb 29  2000");
        assert_eq!(date(1_735_689_599), "Dec 31  2024");
        assert_eq!(date(u32::MAX), "Feb  7  2106");
    }

    #[test]
    fn modes_are_as_ls_writes_them() {
        assert_eq!(mode(0o100_644), "-rw-r--r--");
        assert_eq!(mode(0o041_777), "drwxrwxrwt");
        assert_eq!(mode(0o104_755), "-rwsr-xr-x");
        assert_eq!(mode(0o102_644), "-rw-r-Sr--");
        assert_eq!(mode(0o120_777), "lrwxrwxrwx");
    }

    #[test]
    fn a_line_ends_with_the_name() {
        let attrs = Attrs {
            size: Some(12),
            owner: Some((1000, 0)),
            mode: Some(0o100_600),
            times: Some((0, 0)),
        };
        let line = String::from_utf8(line(b"a b", &attrs, 1)).unwrap();
        assert_eq!(line, "-rw-------   1 vercel-sandbox root           12 Jan  1  1970 a b");
    }
}
