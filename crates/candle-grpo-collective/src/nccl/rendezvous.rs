//! Exchanges NCCL's identifier over TCP, for launchers without MPI.
//!
//! Rank 0 listens on the port after `MASTER_PORT`, because torchrun listens on `MASTER_PORT`. The
//! connections stay open: if one closes, a rank has ended.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, TcpListener, TcpStream, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

use candle_core::{Result, bail};

use super::library::UniqueId;
use crate::launch::Master;

/// First bytes in a rank's greeting.
const GREETING: &[u8; 8] = b"grponccl";

/// Maximum time for one greeting, so that a connection from another program delays nothing.
const GREETING_BOUND: Duration = Duration::from_secs(5);

/// Listens for the other ranks and sends them the identifier. Returns the connections to ranks 1, 2
/// and so on.
pub(super) fn serve(
    master: &Master,
    world_size: usize,
    id: &UniqueId,
    bound: Duration,
) -> Result<Vec<TcpStream>> {
    let port = master.id_port;
    let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, port))
        .or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)));
    let listener = match listener {
        Ok(listener) => listener,
        Err(error) => {
            bail!("MASTER_PORT: port {port}, the one after it, must be free on rank 0: {error}")
        }
    };
    listener.set_nonblocking(true)?;
    let end = Instant::now() + bound;
    let mut ranks: Vec<Option<TcpStream>> = (1..world_size).map(|_| None).collect();
    while ranks.iter().any(Option::is_none) {
        if Instant::now() > end {
            let missing = ranks.iter().position(Option::is_none).unwrap_or_default() + 1;
            bail!(
                "WORLD_SIZE: {world_size}, but rank {missing} has not connected to rank 0 within {bound:?}"
            );
        }
        let Ok((stream, _)) = listener.accept() else {
            thread::sleep(Duration::from_millis(10));
            continue;
        };
        let Some((rank, size)) = greeting(&stream) else {
            continue;
        };
        if size != world_size {
            bail!("WORLD_SIZE: {size} on rank {rank}, must be {world_size} as on rank 0");
        }
        match ranks.get_mut(rank.wrapping_sub(1)) {
            Some(place @ None) => *place = Some(stream),
            _ => bail!("RANK: {rank} on two processes, must be on one"),
        }
    }
    let mut streams: Vec<TcpStream> = ranks.into_iter().flatten().collect();
    for stream in &mut streams {
        stream.write_all(id)?;
    }
    Ok(streams)
}

/// Reads the rank and the number of ranks from a connected process. `None` if it is another
/// program.
fn greeting(mut stream: &TcpStream) -> Option<(usize, usize)> {
    let mut bytes = [0; 16];
    stream.set_nonblocking(false).ok()?;
    stream.set_read_timeout(Some(GREETING_BOUND)).ok()?;
    stream.read_exact(&mut bytes).ok()?;
    stream.set_read_timeout(None).ok()?;
    let number = |bytes: &[u8]| {
        bytes
            .iter()
            .rev()
            .fold(0, |n, &byte| n << 8 | usize::from(byte))
    };
    (bytes[..8] == *GREETING).then(|| (number(&bytes[8..12]), number(&bytes[12..])))
}

/// Receives the identifier from rank 0, and returns it with the connection.
pub(super) fn join(
    master: &Master,
    rank: usize,
    world_size: usize,
    bound: Duration,
) -> Result<(UniqueId, TcpStream)> {
    let (address, port) = (&master.address, master.id_port);
    let end = Instant::now() + bound;
    let connect = || -> std::io::Result<TcpStream> {
        let mut last = std::io::Error::other("the name has no address");
        for address in (address.as_str(), port).to_socket_addrs()? {
            match TcpStream::connect_timeout(&address, GREETING_BOUND) {
                Ok(stream) => return Ok(stream),
                Err(error) => last = error,
            }
        }
        Err(last)
    };
    let mut stream = loop {
        match connect() {
            Ok(stream) => break stream,
            Err(error) if Instant::now() > end => bail!(
                "MASTER_ADDR: no connection to rank 0 at {address}, port {port}, within {bound:?}: {error}"
            ),
            Err(_) => thread::sleep(Duration::from_millis(100)),
        }
    };
    let mut bytes = GREETING.to_vec();
    for number in [rank, world_size] {
        bytes.extend(u32::try_from(number)?.to_le_bytes());
    }
    let mut id = [0; 128];
    stream.set_read_timeout(Some(bound))?;
    match stream
        .write_all(&bytes)
        .and_then(|()| stream.read_exact(&mut id))
    {
        Ok(()) => {}
        Err(error) => {
            bail!("MASTER_ADDR: rank 0 at {address}, port {port}, sent no identifier: {error}")
        }
    }
    stream.set_read_timeout(None)?;
    Ok((id, stream))
}
