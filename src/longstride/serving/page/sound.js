// Sound as mu-law bytes: playing it, and reading files.

import { codeOf, soundOf } from "./bytes.js";

const LEAST_RATE = 8000; // that browsers can play; slower sound is played with samples repeated

export class Player {
  constructor(rate, ontime) {
    this.rate = rate;
    this.ontime = ontime;
  }

  get playing() {
    return Boolean(this.source);
  }

  // Plays bytes from `start` on; calls ontime with the byte that is heard, and with null at the end.
  play(bytes, start = 0) {
    this.stop();
    this.context ??= new AudioContext();
    this.context.resume();
    const repeat = Math.ceil(LEAST_RATE / this.rate);
    const part = bytes.subarray(start);
    if (!part.length) return;
    const buffer = this.context.createBuffer(1, part.length * repeat, this.rate * repeat);
    const samples = buffer.getChannelData(0);
    for (let place = 0; place < samples.length; place += 1) samples[place] = soundOf(part[Math.floor(place / repeat)]);
    const source = this.context.createBufferSource();
    source.buffer = buffer;
    source.connect(this.context.destination);
    source.onended = () => { if (this.source === source) this.stop(); };
    this.source = source;
    const begun = this.context.currentTime;
    source.start();
    const follow = () => {
      if (this.source !== source) return;
      this.ontime(Math.min(bytes.length - 1, start + Math.floor((this.context.currentTime - begun) * this.rate)));
      requestAnimationFrame(follow);
    };
    follow();
  }

  stop() {
    const { source } = this;
    this.source = null;
    source?.stop();
    this.ontime(null);
  }
}

// The sound of a file, mixed to one channel and resampled, as mu-law bytes; at most `most` of them.
export async function fromFile(file, rate, most) {
  const context = new OfflineAudioContext(1, 1, Math.max(rate, LEAST_RATE));
  let sound;
  try {
    sound = await context.decodeAudioData(await file.arrayBuffer());
  } catch {
    throw new Error(`${file.name} holds no sound that this browser can read.`);
  }
  const every = sound.sampleRate / rate;
  const count = Math.min(most, Math.floor(sound.length / every));
  const channels = Array.from({ length: sound.numberOfChannels }, (_, index) => sound.getChannelData(index));
  return Uint8Array.from({ length: count }, (_, place) => {
    const at = Math.floor(place * every);
    return codeOf(channels.reduce((sum, channel) => sum + channel[at], 0) / channels.length);
  });
}
