"""Built-in block lists: hosts whose pages hold little text or are not for training, and endings of files."""

from __future__ import annotations

from typing import Literal

DomainCategory = Literal["adult", "encyclopedias", "files", "code", "media", "shops", "shorteners", "social"]
ExtensionCategory = Literal["archives", "audio", "code", "documents", "images", "programs", "video"]

# Registered domains, or hosts; each stands for all hosts below it.
DOMAINS: dict[DomainCategory, str] = {
    "adult": """chaturbate.com cam4.com onlyfans.com pornhub.com redtube.com spankbang.com stripchat.com
        xhamster.com xnxx.com xvideos.com youporn.com eporn.com e-hentai.org nhentai.net""",
    "encyclopedias": "wikipedia.org wikimedia.org wiktionary.org wikidata.org",
    "files": """4shared.com box.com docs.google.com drive.google.com dropbox.com mediafire.com mega.nz
        onedrive.live.com rapidgator.net scribd.com slideshare.net wetransfer.com zippyshare.com""",
    "code": "bitbucket.org gist.github.com github.com gitlab.com sourceforge.net",
    "media": """bandcamp.com dailymotion.com deviantart.com flickr.com giphy.com gfycat.com gyazo.com
        imgflip.com imgur.com liveleak.com memegenerator.net netflix.com photobucket.com pinterest.com
        pinterest.co.uk prnt.sc redgifs.com soundcloud.com spotify.com streamable.com tiktok.com twitch.tv
        vimeo.com vine.co youtu.be youtube.com youtube-nocookie.com""",
    "shops": """alibaba.com aliexpress.com amazon.ca amazon.co.jp amazon.co.uk amazon.com amazon.com.au
        amazon.de amazon.es amazon.fr amazon.in amazon.it amzn.to apps.apple.com bestbuy.com ebay.co.uk
        ebay.com ebay.de etsy.com itunes.apple.com newegg.com play.google.com store.steampowered.com
        target.com walmart.com""",
    "shorteners": "adf.ly bit.ly buff.ly goo.gl is.gd ow.ly rebrand.ly t.co tiny.cc tinyurl.com v.gd",
    "social": """discord.com discord.gg facebook.com fb.com fb.me instagram.com linkedin.com plus.google.com
        redd.it reddit.com snapchat.com t.me telegram.me threads.net twitter.com vk.com weibo.com x.com""",
}
EXTENSIONS: dict[ExtensionCategory, str] = {
    "archives": "7z bz2 cab gz iso lz4 rar tar tgz xz z zip zst",
    "audio": "aac aiff flac m4a mid midi mp3 oga ogg opus wav wma",
    "code": "css js json map mjs rss swf wasm xml xsl",
    "documents": "ai csv djvu doc docx eps epub key mobi odp ods odt pdf ppt pptx ps rtf tex xls xlsx",
    "images": "avif bmp gif gifv heic ico jpe jpeg jpg png psd raw svg tif tiff webp",
    "programs": "apk app bat bin class deb dll dmg exe img jar msi pkg rpm sh so torrent",
    "video": "3gp avi f4v flv m3u8 m4v mkv mov mp4 mpeg mpg ogv ts vob webm wmv",
}
